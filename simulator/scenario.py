"""What a simulated run is like: how many peers, how bad the network, how often somebody dies; and what came of it.

Read by the simulator.  A seed draws its own scenario, so that a sweep over seeds is also one over worlds.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from farflung.protocol.manifest import Manifest
from farflung.protocol.model_schema import BorderTensor, ModelSchema, StageSpec, TensorSpec

# How members lie about their state: see bad_peers.py.
LIES = (
    "forge",
    "mute",
    "junk",
    "lone",
    "echo",
    "hush",
    "serve",
    "censor",
    "pick",
    "keep",
    "slander",
    "refuse",
)
# These need an honest majority: else it is their word against that of most.
ABOUT_OTHERS = ("censor", "pick", "keep", "slander", "refuse")
# What one member may do to a run that needs everybody: of_one_that_holds_up draws these.
ABOUT_THEMSELVES = ("deny", "deaf")
# What an owner may say of its results that nobody can prove: of_misnamed_results draws these.
ABOUT_RESULTS = ("misname", "length")
# How an owner and a root of a mesh may contradict each other: of_sums draws these.
ABOUT_SUMS = ("twist", "disown")


@dataclass
class SimulationReport:
    seed: int
    version: int
    seconds: float
    events: int
    checks: int
    kills: int
    steps_committed: int
    outcome: str  # "finished", or why the run rightly waits
    log: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Scenario:
    """How hostile the world is.  The defaults make a run in which nearly everything happens somewhere."""

    peers: int = 4
    chunks: int = 3
    fragments: int = 1
    rounds: int = 5
    min_peers: int = 2
    codec: str = "fp32"
    gather_codec: str = "fp32"
    deadline_s: float = 6.0  # a round waits so long for whoever is not ready
    grace_s: float = 3.0  # for stragglers
    dead_after_s: float = 3.0
    group: int = 0  # members of a mesh's group; 0: rounds are flat
    undialable: int = 0  # how many of the peers can't be dialled: they own nothing and dial others
    helpers: int = 0  # so many of the last peers have no trainer
    # By which those meet: "steady", "dies" again and again, "lies" about bytes, "withholds" those of two peers for
    # good; "": there is none.
    relay: str = ""
    # Relays of all who can be dialled: "steady", "dies", or "drops" what passes it.
    offered: str = ""
    roams_every_s: float = 0.0  # so often each of them has another address; 0: never
    routers: str = ""  # past which those meet: "easy" ones, "mixed" with a hard one; "": nobody tries
    faults_until_s: float = 8.0
    end_s: float = 120.0
    drop: float = 0.03
    duplicate: float = 0.03
    slow: float = 0.05  # share of messages that take up to 3 s, which also reorders them
    kill_per_effect: float = 0.004
    cut_per_s: float = 0.05
    trainer_crash_per_s: float = 0.02
    every_rounds: int = 0  # between checkpoints; 0: none
    one_store: bool = False  # all peers keep their checkpoints at one place
    go_back_after_s: float = 4.0
    blackout_at_s: float = 0.0  # everybody is killed at once; 0: never
    store_fails: float = 0.1  # share of writes and reads
    results_on_disk: bool = False  # results of past rounds survive kills
    keeps: bool = False  # and so does the newest version of every peer's state
    leave_per_s: float = 0.0  # how often a peer is asked to leave; it comes back a while later
    step: str = "nesterov"
    schedule: str = "blocking"
    period_s: float = 0.0
    overlap_steps: int = 0
    mix: float = 0.0
    hostile: float = 0.0  # share of the last peer's bulk frames that it spoils
    hostile_until_s: float = 8.0
    forges: str = ""  # how the last peer changes what it has learned: "1000x", "flip" or "nan"
    policy: str = "robust"
    liars: int = 0  # the last so many peers lie to the coordinator about their state, in league
    lies: str = ""  # how: see bad_peers.py
    late_joiners: int = 0  # so many of the last honest peers come when the liars are there
    reads_ahead: int = 0  # batches that the loader of every trainer holds back when it gives one out
    looks_every: int = 1  # steps, at most, after which a trainer hears its agent, as several ranks do
    stream_samples: int = 0  # the data is a stream with so many; 0: it is indexed, and its length is known
    work_liars: int = 0  # so many of the last peers say what is not so of their data and their work
    work_lies: str = ""  # about what, such as "length tokens": see bad_peers.py
    work_lies_early: bool = False  # from the start on
    believed_most: float = 8.0  # times the tokens that such a liar has, so many may be believed
    audit: float = 0.037  # share of chunks that are merged again
    cheats: bool = False  # the last peer corrupts one chunk of each round that it merges
    cheats_in_group: bool = False  # of a mesh: what its group adds up, not the result
    league: int = 0  # so many of the others audit for it, and find nothing
    restarts: bool = False  # these others restart instead after each commit of theirs, with what they sent
    accuses: bool = False  # the last peer calls every sum wrong that it audits
    mutes: bool = False  # it says nothing of what it audits
    withholds: bool = False  # it gives what it contributed to owners, and not to auditors
    # The coordinator is cut off from the first so many peers, for so long; 0: from nobody.
    cut_off: int = 0
    cut_off_at_s: float = 0.0
    cut_off_s: float = 0.0
    stranger: bool = False  # somebody comes then whom nobody knows, and is not cut off
    batch: int = 0  # microbatches of a synchronous batch; 0: peers take steps of their own
    micro: int = 2  # samples in a microbatch
    poison_every: int = 0  # one of so many samples spoils the loss of its microbatch; 0: none does
    clip: float = 0.0  # the longest gradient of a batch; 0: it is not clipped
    stages: int = 1  # the model is cut into so many
    local_micros: int = 0  # stages take a step of their own after so many microbatches; 0: they only sum
    damaged: float = 0.0  # share of crossings that the lines damage
    # Peers, by their place in the order, that are bad neighbours for the rest of the run: see neighbours.py.
    apart: tuple[tuple[int, int], ...] = ()  # these two can't reach each other
    mute: tuple[int, ...] = ()  # they answer nothing about microbatches, and get along otherwise
    damages: tuple[int, ...] = ()  # every crossing of theirs is damaged
    slanders: tuple[int, ...] = ()  # they complain of neighbours that do nothing wrong
    bad_from_s: float = 0.0  # all of them from then on
    deaths_per_s: float = 0.0  # of peers with a seat, in the whole run: see cut_lines.py
    stage_chunks: tuple[int, ...] = ()  # of each stage
    offers: tuple[tuple[int, ...], ...] = ()  # of each peer, in order: the stages that it could hold
    slow_peers: tuple[float, ...] = ()  # how many times as long a microbatch takes it as others
    rebalance_s: float = 0.0  # how often it is looked at whether a peer should serve another stage; 0: never
    any_gain_moves: bool = False  # peers, to another stage
    # So long into the calm the host says rewind, if nobody holds the newest version; 0: never.
    host_after_s: float = 0.0
    # So long a chunk takes on the way up the first peer's line, one after the other; 0: its line is like all others.
    slow_line_s: float = 0.0
    amends: int = 0  # so often the host changes what may change while a run goes on
    evaluates: bool = False  # the held-out loss, of every second version and the last one
    sync_every: int = 4  # steps of a period
    start_rounds: int = 0  # so many have shorter ones
    # The coordinator's disk: "key", all but the key is lost once; "copy", an older state comes back; "": it stays.
    loses: str = ""

    @property
    def lines_are_good(self) -> bool:
        """Whatever is sent comes, and soon, as long as its reader lives; and the coordinator is always there."""
        lines = (self.drop, self.slow, self.damaged, self.cut_per_s, self.apart, self.mute, self.damages)
        return not any((*lines, self.slanders, self.kill_per_effect, self.cut_off, self.blackout_at_s))

    @property
    def is_calm(self) -> bool:
        """No misfortune at all happens."""
        lines = (self.drop, self.duplicate, self.slow, self.damaged, self.cut_per_s)
        deaths = (self.kill_per_effect, self.deaths_per_s, self.trainer_crash_per_s, self.blackout_at_s)
        neighbours = (self.apart, self.mute, self.damages, self.slanders)
        return not any((*lines, *deaths, *neighbours, self.leave_per_s, self.loses))

    def without_chance(self) -> Scenario:
        """No frame is lost, late or doubled, and nobody dies or is cut off at random."""
        return replace(
            self,
            drop=0.0,
            duplicate=0.0,
            slow=0.0,
            kill_per_effect=0.0,
            cut_per_s=0.0,
            trainer_crash_per_s=0.0,
        )

    @staticmethod
    def of(seed: int) -> Scenario:
        """The seed also chooses how large the run is, and how bad the world."""
        draw = random.Random(f"scenario {seed}")
        peers = draw.choice((2, 3, 3, 3, 4, 5))
        chunks = draw.choice((1, 2, 3, 4))
        return Scenario(
            peers=peers,
            chunks=chunks,
            rounds=draw.choice((2, 3, 4)),
            min_peers=draw.choice((1, 2, 2)),
            codec=draw.choice(("fp32", "fp32", "fp32", "fp32", "fp32", "int8", "int4", "auto")),
            undialable=draw.choice((0, 0, 1)),
            drop=draw.choice((0.0, 0.02, 0.08)),
            slow=draw.choice((0.0, 0.05, 0.1)),
            kill_per_effect=draw.choice((0.0, 0.005, 0.01, 0.02)),
            cut_per_s=draw.choice((0.0, 0.05, 0.1)),
            fragments=min(chunks, draw.choice((1, 2, 3))),
            every_rounds=draw.choice((0, 1, 1, 2)),
            one_store=draw.choice((False, True)),
            go_back_after_s=draw.choice((0.0, 4.0, 4.0, 10.0)),
            blackout_at_s=draw.choice((0.0, draw.uniform(3.0, 8.0))),
            leave_per_s=draw.choice((0.0, 0.0, 0.05)),
            results_on_disk=seed % 3 == 0,
            audit=(0.037, 0.5, 1.0)[seed % 3],
            host_after_s=30.0 if seed % 4 == 1 else 0.0,
        ).scheduled(draw)

    @staticmethod
    def of_evaluation(seed: int) -> Scenario:
        """The world of the seed, bad for as long as some long periods take; one of four of them is calm."""
        drawn = replace(
            Scenario.of(seed), evaluates=True, sync_every=40, rounds=4, period_s=0.0, overlap_steps=0
        )
        worse = replace(drawn, faults_until_s=40.0, end_s=400.0, blackout_at_s=0.0)
        return worse if seed % 4 != 3 else replace(worse.without_chance(), leave_per_s=0.0, store_fails=0.0)

    @staticmethod
    def of_adamw(seed: int) -> Scenario:
        """The world of the seed, or one of liars, with a second moment in the state of every peer."""
        return replace(Scenario.of_liars(seed) if seed % 4 == 3 else Scenario.of(seed), step="adamw")

    @staticmethod
    def of_batches(seed: int) -> Scenario:
        """Synchronous batches in the same bad worlds, which stay bad for as long as a few batches take; one of four of
        them is calm."""
        draw, drawn = random.Random(f"batches {seed}"), Scenario.of(seed)
        batched = replace(
            drawn,
            batch=draw.choice((1, 4, 12, 24, 40)),
            micro=draw.choice((1, 2, 3)),
            poison_every=draw.choice((0, 0, 7, 20)),
            clip=(0.0, 1.0, 0.0, 0.0, 1e6)[seed % 5],
            rounds=draw.choice((3, 6, 10)),
            fragments=1,
            schedule="blocking",
            period_s=0.0,
            overlap_steps=0,
            mix=0.0,
            policy="mean",
            step=draw.choice(("nesterov", "adamw")),
            codec=draw.choice(("fp32", "fp32", "fp32", "int8")),
            cut_per_s=draw.choice((0.0, 0.1, 0.3)),
            trainer_crash_per_s=draw.choice((0.0, 0.02, 0.1)),
            # A version that one peer alone has counted is held by it alone until its beat gets through.
            go_back_after_s=draw.choice((0.0, 10.0)),
            blackout_at_s=drawn.blackout_at_s if draw.random() < 0.3 else 0.0,
            faults_until_s=draw.choice((8.0, 20.0, 30.0)),
            end_s=300.0,
        )
        if seed % 4 != 3:
            return batched
        return replace(batched.without_chance(), leave_per_s=0.0, blackout_at_s=0.0, store_fails=0.0)

    @staticmethod
    def of_stages(seed: int) -> Scenario:
        """Pipelines in the same bad worlds: each peer could hold one stage, some or all; one of four of them is calm.

        Every stage has somebody who can hold nothing else, or everybody can hold everything: where nobody is moved, a
        run in which the last one that could hold a stage sits elsewhere would rightly wait.
        """
        draw, batched = random.Random(f"stages {seed}"), Scenario.of_batches(seed)
        stages = draw.choice((2, 2, 3, 3, 4))
        seats = [draw.choice((1, 1, 2, 2, 3)) for _ in range(stages)]
        everything = tuple(range(stages))
        if draw.random() < 0.4:
            offers = [everything] * sum(seats)
        else:
            offers = [(stage,) for stage in everything]
            for _ in range(sum(seats) - stages):
                some = draw.sample(everything, draw.randint(1, stages))
                offers.append(tuple(some))
            draw.shuffle(offers)
        chunks = tuple(draw.choice((1, 1, 2, 3)) for _ in everything)
        return replace(
            batched,
            peers=len(offers),
            stages=stages,
            stage_chunks=chunks,
            chunks=sum(chunks),
            offers=tuple(offers),
            damaged=0.0 if seed % 4 == 3 else draw.choice((0.0, 0.0, 0.02)),
            slow_peers=tuple(draw.choice((1.0, 1.0, 1.0, 4.0)) for _ in offers),
            batch=draw.choice((4, 8, 12, 24)),
            rounds=draw.choice((2, 3, 5)),
            min_peers=draw.choice((1, 2)),
            step="adamw",
            # The more parties, the more often somebody dies: here about as often as with one stage.
            kill_per_effect=batched.kill_per_effect * draw.choice((0.05, 0.1, 0.2)),
            faults_until_s=draw.choice((8.0, 15.0, 25.0)) if seed % 4 != 3 else 0.0,
            rebalance_s=random.Random(f"moves {seed}").choice((0.0, 2.0, 5.0)),
        )

    @staticmethod
    def of_evaluated(seed: int, stages: bool) -> Scenario:
        """Batches, in one piece or in stages, with the held-out loss of every fifth version and of the last one."""
        draw = random.Random(f"evaluated batches {seed}")
        return replace(
            Scenario.of_stages(seed) if stages else Scenario.of_batches(seed),
            evaluates=True,
            batch=40,
            micro=8,
            poison_every=draw.choice((0, 0, 7, 10)),
            rounds=draw.choice((5, 6)),
        )

    @staticmethod
    def of_local_stages(seed: int) -> Scenario:
        """The world of `of_stages`, whose stages take steps of their own within a batch."""
        draw = random.Random(f"local stages {seed}")
        step, micros = draw.choice(("nesterov", "mean")), draw.choice((1, 2, 3))
        # The gradient of a batch is nowhere there, so nothing clips it.
        return replace(Scenario.of_stages(seed), step=step, local_micros=micros, clip=0.0)

    @staticmethod
    def of_dense_stages(seed: int) -> Scenario:
        """Pipelines in which seats of all stages go and come within every batch; in three of four seeds all that is
        sent comes, so that nothing explains a wait but the rules themselves."""
        draw = random.Random(f"dense stages {seed}")
        stages = draw.choice((2, 3, 3, 4))
        offers = [(stage,) for stage in range(stages) for _ in range(draw.choice((2, 2, 3)))]
        draw.shuffle(offers)
        chunks = tuple(draw.choice((1, 1, 2)) for _ in range(stages))
        bad = seed % 4 == 3
        return Scenario(
            peers=len(offers),
            stages=stages,
            stage_chunks=chunks,
            chunks=sum(chunks),
            offers=tuple(offers),
            slow_peers=tuple(draw.choice((2.0, 4.0, 6.0)) for _ in offers),
            batch=draw.choice((12, 24, 40)),
            rounds=2,
            min_peers=1,
            step="adamw",
            policy="mean",
            drop=draw.choice((0.02, 0.08)) if bad else 0.0,
            duplicate=draw.choice((0.0, 0.05)) if bad else 0.0,
            slow=draw.choice((0.0, 0.05)) if bad else 0.0,
            cut_per_s=draw.choice((0.0, 0.2)) if bad else 0.0,
            kill_per_effect=0.0,
            deaths_per_s=draw.choice((0.2, 0.4, 0.8)),
            trainer_crash_per_s=draw.choice((0.0, 0.02, 0.05)),
            go_back_after_s=draw.choice((4.0, 10.0)),
            every_rounds=1,
            faults_until_s=draw.choice((15.0, 25.0)),
            end_s=300.0,
        )

    @staticmethod
    def of_neighbours(seed: int) -> Scenario:
        """Pipelines in which nobody dies and neighbours can't work with each other, for ever, in one of four ways; each
        stage beside such a one has another seat, so that no batch may be held up for long."""
        draw = random.Random(f"neighbours {seed}")
        stages = draw.choice((2, 2, 3))
        seats = [draw.choice((2, 2, 3)) for _ in range(stages)]
        offers = [(stage,) for stage, count in enumerate(seats) for _ in range(count)]
        at = draw.randrange(stages - 1)
        above, below = ([i for i, each in enumerate(offers) if each == (s,)] for s in (at, at + 1))
        pairs = [(draw.choice(above), draw.choice(below))]
        if draw.random() < 0.5:  # and two others
            left = [i for i in above if i != pairs[0][0]], [i for i in below if i != pairs[0][1]]
            pairs.append((draw.choice(left[0]), draw.choice(left[1])))
        bad = draw.choice(above + below)
        chunks = tuple(draw.choice((1, 2)) for _ in seats)
        kind = ("apart", "mute", "damages", "slanders")[seed % 4]
        long = kind in ("apart", "slanders")  # else a batch is over before anybody can say a word
        noise = draw.choice((0.0, 0.0, 0.02, 0.08))
        return Scenario(
            peers=len(offers),
            stages=stages,
            stage_chunks=chunks,
            chunks=sum(chunks),
            offers=tuple(offers),
            batch=24 if long else draw.choice((8, 12, 24)),
            rounds=2,
            min_peers=1,
            step="adamw",
            policy="mean",
            drop=noise,
            duplicate=noise,
            slow=noise / 2,
            kill_per_effect=0.0,
            cut_per_s=0.0,
            trainer_crash_per_s=0.0,
            faults_until_s=8.0,
            end_s=400.0,
            slow_peers=tuple(draw.choice((10.0,) if long else (1.0, 2.0, 5.0)) for _ in offers),
            apart=tuple(pairs) if kind == "apart" else (),
            mute=(bad,) if kind == "mute" else (),
            damages=(bad,) if kind == "damages" else (),
            slanders=(bad,) if kind == "slanders" else (),
            bad_from_s=draw.choice((0.0, 4.0, 5.0, 6.0)),
        )

    @staticmethod
    def of_moves(seed: int) -> Scenario:
        """Stages whose peers are told to move again and again: all could hold everything, some are slow, and any gain
        will do."""
        draw, staged = random.Random(f"moves {seed}"), Scenario.of_stages(seed)
        stages, peers = staged.stages, staged.stages * 2 + draw.choice((1, 2, 3))
        return replace(
            staged,
            peers=peers,
            offers=(tuple(range(stages)),) * peers,
            slow_peers=tuple(draw.choice((1.0, 1.0, 2.0, 6.0)) for _ in range(peers)),
            undialable=min(staged.undialable, 1),
            batch=draw.choice((8, 12)),
            rounds=draw.choice((8, 12)),
            poison_every=0,
            rebalance_s=draw.choice((0.5, 1.0)),
            any_gain_moves=True,
        )

    @staticmethod
    def of_readers_ahead(seed: int) -> Scenario:
        """As `of`, with loaders that ask for batches before the steps that use them."""
        return replace(Scenario.of(seed), reads_ahead=1 + seed % 3)

    @staticmethod
    def of_islands(seed: int) -> Scenario:
        """As `of`, with trainers that hear their agent only every few steps, but where something is due."""
        return replace(Scenario.of(seed), looks_every=2 + seed % 3)

    @staticmethod
    def of_amendments(seed: int) -> Scenario:
        """The world of the seed, one of four with AdamW, whose host changes its terms up to three times."""
        drawn = Scenario.of_adamw(seed) if seed % 4 == 2 else Scenario.of(seed)
        return replace(drawn, amends=1 + seed % 3, rounds=drawn.rounds + 3, start_rounds=4 * (seed % 2))

    @staticmethod
    def of_liars(seed: int) -> Scenario:
        """Members that lie about their state: one of three up to nine of ten, in every way to lie; nobody is killed,
        so that nothing else explains what an honest peer loses."""
        draw = random.Random(f"liars {seed}")
        peers, chunks = draw.choice((3, 5, 10)), draw.choice((2, 3, 4))
        lies = draw.choice(LIES)
        most = peers - 2 if lies == "serve" else (peers - 1) // 2 if lies in ABOUT_OTHERS else peers - 1
        liars = draw.randint(1, most)
        return Scenario(
            peers=peers,
            liars=liars,
            lies=lies,
            late_joiners=1 if lies == "serve" else 0,
            chunks=2 * peers if lies in ABOUT_OTHERS else chunks,  # so that everybody owns some
            fragments=draw.choice((1, 2)),
            codec=draw.choice(("fp32", "int8")),
            rounds=8,
            min_peers=liars + 1 if lies == "keep" else 1,  # else they make rounds among themselves
            kill_per_effect=0.0,
            cut_per_s=0.0,
            trainer_crash_per_s=0.0,
            faults_until_s=6.0,
            end_s=400.0,
        )

    @staticmethod
    def of_one_that_holds_up(seed: int) -> Scenario:
        """Every round needs everybody (`min_peers`), and one of them has no result, or says so."""
        draw = random.Random(f"holds up {seed}")
        peers = draw.choice((3, 4, 5, 10))
        return Scenario(
            peers=peers,
            min_peers=peers,
            liars=1,
            lies=draw.choice(ABOUT_THEMSELVES),
            chunks=2 * peers,
            fragments=draw.choice((1, 2)),
            codec=draw.choice(("fp32", "int8")),
            rounds=8,
            kill_per_effect=0.0,
            cut_per_s=0.0,
            trainer_crash_per_s=0.0,
            faults_until_s=6.0,
            end_s=400.0,
        )

    @staticmethod
    def of_misnamed_results(seed: int) -> Scenario:
        """Nothing else happens but that one of the owners says of its results what is not so."""
        draw = random.Random(f"misnamed {seed}")
        peers, lies = draw.choice((3, 4, 6)), ABOUT_RESULTS[seed % 2]
        batches = (
            {"batch": 12, "policy": "mean", "clip": 1.0} if lies == "length" or draw.random() < 0.5 else {}
        )
        return replace(
            Scenario(**batches).without_chance(),  # type: ignore[arg-type]
            peers=peers,
            min_peers=draw.choice((1, 2)),
            liars=1,
            lies=lies,
            chunks=2 * peers,
            rounds=4,
            faults_until_s=4.0,
            end_s=400.0,
        )

    @staticmethod
    def of_sums(seed: int) -> Scenario:
        """Rounds in groups whose sums are all merged again: of an owner that adds up wrongly, of a root that does, of
        one that contradicts another about a sum, and of honest ones; every other seed has no other faults."""
        draw = random.Random(f"sums {seed}")
        how = draw.choice(("group", "result", *ABOUT_SUMS, ""))
        lies = how if how in ABOUT_SUMS else ""
        faults = ("drop", "duplicate", "slow", "kill_per_effect", "cut_per_s", "trainer_crash_per_s")
        rare = {fault: getattr(Scenario.of(seed), fault) * (seed % 2) / 2 for fault in faults}
        return Scenario(
            peers=draw.choice((6, 8, 9)),
            group=draw.choice((2, 3)),
            chunks=draw.choice((4, 6)),
            rounds=draw.choice((3, 4)),
            codec=draw.choice(("fp32", "int8")),
            policy=draw.choice(("mean", "robust")),
            period_s=draw.choice((0.0, 4.0)),
            audit=1.0,
            cheats=how in ("group", "result"),
            cheats_in_group=how == "group",
            league=draw.choice((0, 0, 1)) * (how in ("group", "result")),
            liars=bool(lies),
            lies=lies,
            end_s=300.0,
            **rare,
        )

    @staticmethod
    def cut_off_from_all(seed: int) -> Scenario:
        """The coordinator loses all its peers for ten times the time after which a run may go back, while a stranger
        gets through."""
        draw, drawn = random.Random(f"cut off {seed}"), Scenario.of(seed)
        return replace(
            drawn,
            rounds=16,
            every_rounds=draw.choice((0, 3, 4, 5)),
            one_store=True,  # the stranger, too, reads an older state there
            go_back_after_s=4.0,
            kill_per_effect=drawn.kill_per_effect / 4,
            faults_until_s=draw.choice((3.0, 6.0)),
            blackout_at_s=0.0,
            leave_per_s=0.0,
            cut_off=drawn.peers,
            cut_off_at_s=draw.uniform(8.0, 16.0),
            cut_off_s=40.0,
            stranger=True,
            host_after_s=0.0,
            end_s=240.0,
        )

    @staticmethod
    def cut_off_from_one(seed: int) -> Scenario:
        """One peer of several is cut off, and while it is all others are killed: they go back to a checkpoint, and it
        comes back with more than they have, or with less."""
        draw = random.Random(f"cut off from one {seed}")
        peers = draw.choice((3, 4, 5))
        cut_off_at_s = draw.uniform(10.0, 14.0)
        return replace(
            Scenario.of(seed),
            peers=peers,
            rounds=24,
            min_peers=draw.choice((1, peers, peers)),  # all: the others can only go back
            every_rounds=draw.choice((4, 6, 8)),
            go_back_after_s=4.0,
            faults_until_s=4.0,
            blackout_at_s=cut_off_at_s + 0.5,
            leave_per_s=0.0,
            cut_off=1,
            cut_off_at_s=cut_off_at_s,
            cut_off_s=draw.uniform(8.0, 14.0),
            host_after_s=0.0,
            end_s=240.0,
        )

    @staticmethod
    def of_lost_disks(seed: int) -> Scenario:
        """The coordinator's disk is lost in the middle of the run, at any moment of a round.  In two of three seeds
        nobody else dies, and then nothing may be lost that anybody had heard of."""
        draw, drawn = random.Random(f"lost disks {seed}"), Scenario.of(seed)
        return replace(
            drawn,
            rounds=6,
            kill_per_effect=draw.choice((0.002, 0.005)) if seed % 3 == 0 else 0.0,
            cut_per_s=drawn.cut_per_s if seed % 3 == 0 else 0.0,
            trainer_crash_per_s=0.02 if seed % 3 == 0 else 0.0,
            leave_per_s=0.0,
            blackout_at_s=0.0,
            go_back_after_s=10.0,
            loses=draw.choice(("key", "copy")),
            amends=draw.choice((0, 0, 2)),
            faults_until_s=draw.choice((8.0, 20.0)),
            end_s=240.0,
        )

    def scheduled(self, draw: random.Random) -> Scenario:
        kinds = ("blocking", "blocking", "overlap", "streaming" if self.fragments > 1 else "overlap")
        return replace(
            self,
            schedule=draw.choice(kinds),
            period_s=draw.choice((0.0, 0.0, 0.8)),
            overlap_steps=draw.choice((0, 0, 2)),
            mix=draw.choice((0.0, 0.5)),
        )


# ---- simulated run -----------------------------------------------------------------------------------------
# What a scenario of the simulator is for the run that is simulated: its run.toml, and what its model looks
# like.
#
# Read by the world. One tensor, four values a chunk; or one of each stage.

_STEP_KEYS = {
    "nesterov": "momentum = 0.9",
    "auto": 'step = "nesterov"',  # the momentum follows from the rounds
    "mean": 'step = "mean"',
    "sparse": 'step = "sparse"',
    "adamw": 'step = "adamw"\nlr = 0.01',
    "muon": 'step = "muon"\nlr = 0.01',
}


# Nobody here goes by the batch: as large as makes sixteen windows cheap.
EVALUATED_BATCH = 8
_EVAL_KEYS = 'source = "python-stdlib"\nwindows = 16\n'


def manifest_for(scenario: Scenario) -> Manifest:
    return Manifest.from_toml(
        f"""
        [run]
        name = "simulated"
        rounds = {scenario.rounds}
        min_peers = {scenario.min_peers}
        max_peers = {max(64, scenario.peers + 1)}
        [data]
        lease_samples = {max(8, EVALUATED_BATCH * scenario.evaluates)}
        batch = {EVALUATED_BATCH if scenario.evaluates and not scenario.batch else 2}
        [eval]
        {_EVAL_KEYS if scenario.evaluates else ""}
        every_rounds = {2 if scenario.evaluates and not scenario.batch else '"auto"'}
        [inner]
        schedule = "{"linear" if scenario.step in ("adamw", "muon") else "constant"}"
        [outer]
        {_STEP_KEYS[scenario.step]}
        schedule = "{scenario.schedule}"
        [round]
        period_s = {scenario.period_s}
        codec = "{scenario.codec}"
        gather_codec = "{scenario.gather_codec}"
        fragments = {scenario.fragments}
        group = {scenario.group}
        sync_every = {scenario.sync_every}
        start_rounds = {scenario.start_rounds}
        deadline_s = {scenario.deadline_s}
        scatter_grace_s = {scenario.grace_s}
        keep_results = 3
        [merge]
        policy = "{scenario.policy}"
        audit = {scenario.audit}
        [net]
        heartbeat_s = 1.0
        dead_after_s = {scenario.dead_after_s}
        [checkpoint]
        every_rounds = {scenario.every_rounds}
        go_back_after_s = {scenario.go_back_after_s}
        [pipeline]
        batch = {scenario.batch}
        micro = {scenario.micro}
        clip = {scenario.clip}
        stages = {scenario.stages}
        rebalance_s = {scenario.rebalance_s}
        codec = "fp32"
        mode = "{"local" if scenario.local_micros else "sync"}"
        local_micros = {max(1, scenario.local_micros)}
        """,
        "simulated",
    )


def model_for(scenario: Scenario) -> ModelSchema:
    """One tensor, four values a chunk; or one of each stage.  For Muon a chunk has two rows of a matrix."""
    passed = (BorderTensor("float32", (2 + scenario.stages,)),)  # see stage_trainer.py
    chunks = scenario.stage_chunks or (scenario.chunks,)
    names = [f"w{number}" for number in range(len(chunks))] if scenario.stage_chunks else ["w"]
    with_matrices = scenario.step == "muon"
    return ModelSchema(
        tensors=tuple(
            TensorSpec(name, (count * 2, 2) if with_matrices else (count * 4,), "float32", "param")
            for name, count in zip(names, chunks, strict=True)
        ),
        chunk_elements=4,
        chunk_count=scenario.chunks,
        first_plain_chunk=scenario.chunks,
        frozen=bytes(32),
        stages=tuple(
            StageSpec(
                number, number, count, plain_chunks=0, gives=passed if number < scenario.stages - 1 else ()
            )
            for number, count in enumerate(scenario.stage_chunks)
        ),
        matrices=tuple(range(len(names))) if with_matrices else (),
    )
