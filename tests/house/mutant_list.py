"""Rules of the protocol, each with one line that breaks it: what tests/house/mutants.py changes, one at a time.

The text of a rule stands exactly once in its file (tests/house/test_mutants.py looks), so that this list does not rot:
who rewrites a rule writes its mutant anew.  The tests of each are those that are closest to it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    name: str  # the rule that is broken
    file: str
    old: str
    new: str
    tests: tuple[str, ...]  # closest first


# Tests by what they are about; those of whole runs come last, as they take longest.
FRONT_DOOR = ("tests/coordinator/door/test_front_door.py", "tests/coordinator/run/test_admission.py")
ADMISSION = ("tests/coordinator/run/test_admission.py", "tests/coordinator/run/test_invitations.py")
ROUND = (
    "tests/coordinator/rounds/test_in_flight.py",
    "tests/coordinator/run/test_conductor.py",
    "tests/coordinator/run/test_machine.py",
)
WITHHOLDING = (
    "tests/coordinator/rounds/test_withholding.py",
    "tests/coordinator/rounds/test_in_flight.py",
    "tests/whole/test_liars.py",
)
STEADINESS = ("tests/coordinator/rounds/test_steadiness.py", "tests/coordinator/run/test_conductor.py")
WEIGHTS = ("tests/coordinator/rounds/test_screening.py", "tests/coordinator/rounds/test_in_flight.py")
CONDUCTOR = (
    "tests/coordinator/run/test_conductor.py",
    "tests/coordinator/run/test_machine.py",
    "tests/whole/test_hostile_members.py",
)
GUIDANCE = ("tests/coordinator/run/test_guidance.py", "tests/coordinator/run/test_machine.py")
LEASES = (
    "tests/coordinator/ledger/test_leases.py",
    "tests/coordinator/run/test_lending.py",
    "tests/coordinator/run/test_conductor.py",
    "tests/whole/test_churn.py",
)
JOURNAL = (
    "tests/coordinator/test_durability.py",
    "tests/coordinator/ledger/test_journal.py",
    "tests/coordinator/ledger/test_journal_kept.py",
)
GOING_BACK = ("tests/coordinator/run/test_going_back.py", "tests/whole/test_going_back.py")
MEMBER = (
    "tests/collectives/test_member.py",
    "tests/peer/machine/test_lane.py",
    "tests/whole/test_hostile_members.py",
)
FLOW = ("tests/collectives/flow/test_flow.py", "tests/collectives/flow/test_flow_world.py")
FEEDBACK = ("tests/compression/test_feedback.py", "tests/whole/test_fragments.py")
CATCH_UP = ("tests/checkpoints/test_catch_up.py", "tests/whole/test_joining_live.py")
STORE = ("tests/checkpoints/test_store.py",)
LANE = (
    "tests/peer/machine/test_lane.py",
    "tests/peer/machine/test_exchange.py",
    "tests/whole/test_fragments.py",
)
TRAINER = ("tests/peer/machine/test_trainer_view.py", "tests/peer/machine/test_exchange.py")

FRAMES = (
    Mutant(
        "P8 bytes that do not match their hash are refused",
        "protocol/frames.py",
        "if header.length and hash_bytes(payload) != header.hash:",
        "if False:",
        ("tests/protocol/test_frames.py", "tests/collectives/test_zmq_link.py"),
    ),
    Mutant(
        "P8 frames of another run are refused",
        "protocol/frames.py",
        "    if tag != run_tag:",
        "    if False:",
        ("tests/protocol/test_frames.py", "tests/collectives/test_zmq_link.py"),
    ),
    Mutant(
        "P8 a frame is bounded before its bytes are touched",
        "protocol/frames.py",
        "if payload_bytes > payload_max:",
        "if False:",
        ("tests/protocol/test_frames.py", "tests/collectives/test_zmq_link.py"),
    ),
    Mutant(
        "a signature that does not fit is none",
        "protocol/signing.py",
        "        return False",
        "        return True",
        ("tests/peer/test_identity.py", *FRONT_DOOR),
    ),
    Mutant(
        "the run's proof of a state is its signature",
        "protocol/signing.py",
        "return len(proof) == PROOF_BYTES and verify(proof[:32], statement, proof[32:])",
        "return len(proof) == PROOF_BYTES",
        STORE,
    ),
    Mutant(
        "what a set of chunks is called does not depend on the order in which they came",
        "protocol/digests.py",
        "for chunk, chunk_hash in sorted(held):",
        "for chunk, chunk_hash in held:",
        ("tests/collectives/test_member.py", "tests/whole/test_hostile_members.py"),
    ),
)

DOOR = (
    Mutant(
        "a challenge is good for one hello",
        "coordinator/door/hello_check.py",
        "nonces = self._challenges.pop(caller, [])",
        "nonces = self._challenges.get(caller, [])",
        (*FRONT_DOOR, "tests/coordinator/run/test_machine.py"),
    ),
    Mutant(
        "a hello names the key of its connection",
        "coordinator/door/hello_check.py",
        "        if hello.key != key:",
        "        if False:",
        (*FRONT_DOOR, "tests/coordinator/run/test_machine.py"),
    ),
    Mutant(
        "a hello of another run.toml is refused",
        "coordinator/door/hello_check.py",
        "if hello.manifest != self._manifest_digest:",
        "if False:",
        (*FRONT_DOOR, "tests/coordinator/run/test_machine.py"),
    ),
    Mutant(
        "a hello is signed by who it names",
        "coordinator/run/admission.py",
        "if not is_signed(hello, passed.nonce):",
        "if False:",
        ADMISSION,
    ),
    Mutant(
        "an invitation expires",
        "coordinator/run/admission.py",
        "if self._core.clock_s >= found.until_s else",
        "if False else",
        ADMISSION,
    ),
    Mutant(
        "an invitation is for so many",
        "coordinator/run/admission.py",
        "if len(found.guests) >= found.uses:",
        "if False:",
        ADMISSION,
    ),
    Mutant(
        "an identity is here once",
        "coordinator/run/admission.py",
        "if old is not None and old.alive and old.process != hello.process and old.closed_at is None:",
        "if False:",
        (*ADMISSION, "tests/coordinator/run/test_machine.py"),
    ),
    Mutant(
        "a ban of a network is one of all who come from there",
        "coordinator/ledger/register.py",
        "if each.peer == peer or (network and each.network == network):",
        "if each.peer == peer:",
        ("tests/coordinator/run/test_operator_orders.py", *ADMISSION),
    ),
    Mutant(
        "one accuser has nobody banned",
        "coordinator/run/discipline.py",
        "LEAST_ACCUSERS = 2",
        "LEAST_ACCUSERS = 1",
        ADMISSION,
    ),
    Mutant(
        "a private key that others may read is refused",
        "coordinator/door/keys.py",
        "if mode & 0o077:",
        "if False:",
        ("tests/coordinator/test_hosting.py",),
    ),
)

ROUNDS = (
    Mutant(
        "P2 P18 a result is held by most before it is committed",
        "coordinator/rounds/in_flight.py",
        "max(len(here) // 2 + 1, self.rules.min_peers)",
        "1",
        ROUND,
    ),
    Mutant(
        "P9 the word of one owner bars nobody",
        "coordinator/rounds/withholding.py",
        "return 2 * count > len(owners) and count >= min(2, members - 1)",
        "return count > 0",
        WITHHOLDING,
    ),
    Mutant(
        "P9 an owner that lacks what all others hold of most owns nothing",
        "coordinator/rounds/withholding.py",
        "if len(lacking) >= 2 and 2 * len(lacking) > len(senders - {owner})",
        "if False",
        WITHHOLDING,
    ),
    Mutant(
        "P9 an owner that lacks what all others hold of a few, round after round, owns nothing",
        "coordinator/run/conductor.py",
        "unfit = [owner for owner, count in self._withheld.items() if count >= WITHHELD_MOST]",
        "unfit: list[str] = []",
        CONDUCTOR,
    ),
    Mutant(
        "P18 an owner that gives nobody what it merged loses its chunks",
        "coordinator/rounds/in_flight.py",
        "self.censors |= self._who_keeps_results(now, alive)",
        "pass",
        WITHHOLDING,
    ),
    Mutant(
        "P19 who restarts again and again with what it owes is out of rounds",
        "coordinator/rounds/steadiness.py",
        "stays = min(WINDOW, 1 << (len(when) - FORGIVEN))",
        "stays = 0",
        STEADINESS,
    ),
    Mutant(
        "P3 the first restarts cost nothing",
        "coordinator/rounds/steadiness.py",
        "if not when or len(when) <= FORGIVEN:",
        "if not when:",
        STEADINESS,
    ),
    Mutant(
        "P8 what members tell of bytes fits into the journal",
        "coordinator/run/conductor.py",
        "tx_bytes = sum(min(amount, AMOUNT_MAX) for amount in amounts)",
        "tx_bytes = sum(amounts)",
        CONDUCTOR,
    ),
    Mutant(
        "P20 half a model wins no run back that is founded anew",
        "coordinator/run/winning_back.py",
        "if both and (book.forked or self._is_held(conductor)):",
        "if both:",
        ("tests/coordinator/run/test_winning_back.py",),
    ),
    Mutant(
        "where not all donors are told, others are told later",
        "coordinator/run/guidance.py",
        "turn = int(now // DONORS_TURN_S) if len(here) > told else 0",
        "turn = 0",
        GUIDANCE,
    ),
    Mutant(
        "what an owner holds counts when it is what its sender says it sent",
        "coordinator/rounds/in_flight.py",
        "if combined((chunk, hashes[chunk]) for chunk in bits(mask)) == digest:",
        "if True:",
        ROUND,
    ),
    Mutant(
        "what a member got counts when it is what owners answer for",
        "coordinator/rounds/in_flight.py",
        "return mask if combined((c, self.merged[c]) for c in bits(mask)) == report.got_hash else 0",
        "return mask",
        ROUND,
    ),
    Mutant(
        "an owner answers for its own chunks alone",
        "coordinator/rounds/in_flight.py",
        "if chunk < len(self.plan.owners) and self.plan.owner_of(chunk) == peer:",
        "if chunk < len(self.plan.owners):",
        ROUND,
    ),
    Mutant(
        "a report about an earlier decision says nothing of this one",
        "coordinator/rounds/in_flight.py",
        "if self.decision is not None and report.decision_no == self.decision.decision_no:",
        "if self.decision is not None:",
        ROUND,
    ),
    Mutant(
        "results of an earlier decision are worth nothing",
        "coordinator/rounds/in_flight.py",
        "self.merged.clear()",
        "pass",
        ROUND,
    ),
    Mutant(
        "a round has min_peers contributions",
        "coordinator/rounds/in_flight.py",
        "if len(ready) < self.rules.min_peers:",
        "if not ready:",
        ROUND,
    ),
    Mutant(
        "whose contribution is barred does not count",
        "coordinator/rounds/in_flight.py",
        "if member not in self.sent or member in self.barred:",
        "if member not in self.sent:",
        ROUND,
    ),
    Mutant(
        "P9 who refuses most of the others is not believed",
        "coordinator/rounds/in_flight.py",
        "return about if 2 * len(about) <= len(others) or len(others) < 2 else {}",
        "return about",
        (*ROUND[:2], "tests/whole/test_hostile_members.py"),
    ),
    Mutant(
        "P3 a round has an end",
        "coordinator/rounds/in_flight.py",
        "if now - self.opened_at >= self.rules.round_timeout_s:",
        "if False:",
        ROUND,
    ),
    Mutant(
        "P9 no weight is above its cap",
        "coordinator/rounds/weighting.py",
        "capped = [min(float(t), bound) if bound > 0 else 1.0 for t in tokens]",
        "capped = [float(t) for t in tokens]",
        WEIGHTS,
    ),
    Mutant(
        "a newcomer counts for less",
        "coordinator/rounds/weighting.py",
        "trust = [rules.trust.get(name, 1.0) for name in names]",
        "trust = [1.0 for name in names]",
        ("tests/coordinator/rounds/test_weighting.py", *WEIGHTS),
    ),
    Mutant(
        "what is far too long is shortened",
        "coordinator/rounds/screening.py",
        "if name not in out and norm > clip * usual > 0.0:",
        "if False:",
        WEIGHTS,
    ),
    Mutant(
        "who pulls another way than the others is out",
        "coordinator/rounds/screening.py",
        "        if own < least",
        "        if False",
        WEIGHTS,
    ),
    Mutant(
        "a loud owner is scaled down",
        "coordinator/rounds/screening.py",
        "scale = most * usual / energy if 0.0 < most * usual < energy else 1.0",
        "scale = 1.0",
        WEIGHTS,
    ),
)

RUN = (
    Mutant(
        "a hash list is signed by its sender",
        "coordinator/run/conductor.py",
        "cause, problem = ExclusionCause.UNSIGNED, self._witness.problem(member, sent)",
        'cause, problem = ExclusionCause.UNSIGNED, ""',
        CONDUCTOR,
    ),
    Mutant(
        "P7 samples that are not a member's are not acknowledged for it",
        "coordinator/run/conductor.py",
        'problem = leases.problem(member.peer, sent.used, self.fragment) or ""',
        'problem = ""',
        (*CONDUCTOR, *LEASES),
    ),
    Mutant(
        "P7 what the former self of a restarted peer sent is barred",
        "coordinator/run/conductor.py",
        "if self.round is not None and peer in self.round.plan.members and self.round.decision is None:",
        "if False:",
        CONDUCTOR,
    ),
    Mutant(
        "P4 commits are told to members that have shown the run's state",
        "coordinator/run/conductor.py",
        "if self.standing(member).vouched:  # others",
        "if True:  # others",
        (*CONDUCTOR, *GUIDANCE),
    ),
    Mutant(
        "a member that has not heard of the guard's word is not ready",
        "coordinator/run/conductor.py",
        "if beat is None or beat.dropped != self.book.dropped_round:",
        "if beat is None:",
        CONDUCTOR,
    ),
    Mutant(
        "P4 whose digest is not the run's takes the run's state again",
        "coordinator/run/guidance.py",
        "if said.version >= 0 and known is not None and said.digest != known:",
        "if False:",
        GUIDANCE,
    ),
    Mutant(
        "P5 nothing is committed beside a newer journal",
        "coordinator/run/guidance.py",
        "        if said.version > version:",
        "        if False:",
        GUIDANCE,
    ),
    Mutant(
        "P4 state is asked of peers that hold it",
        "coordinator/run/guidance.py",
        "if conductor.standing(other).verified or (peer in makers and self._is_near(other, conductor)):",
        "if True:",
        GUIDANCE,
    ),
    Mutant(
        "what a peer says in an older era counts for nothing",
        "coordinator/run/going_back.py",
        "if beat.era >= self._core.ledger.era:",
        "if True:",
        (*GUIDANCE[:1], *GOING_BACK),
    ),
    Mutant(
        "P7 what only lost versions had used is leased again",
        "coordinator/ledger/leases.py",
        "self.returned = _ranges([(*reach.missing, *self._granted_since(reach)) for reach in reaches])",
        "self.returned = []",
        (*LEASES[:2], *GOING_BACK),
    ),
    Mutant(
        "the trust of a suspect begins anew",
        "coordinator/ledger/ledger.py",
        "book.trust[suspect] = 0",
        "pass",
        ("tests/coordinator/run/test_core.py", "tests/coordinator/rounds/test_screening.py"),
    ),
    Mutant(
        "P7 a commit acknowledges what it used",
        "coordinator/ledger/leases.py",
        "held.uptos = (*held.uptos[:fragment], item.upto, *held.uptos[fragment + 1 :])",
        "pass",
        LEASES,
    ),
    Mutant(
        "P7 a lease is used within its bounds",
        "coordinator/ledger/leases.py",
        "if not upto <= item.upto <= held.stop:",
        "if False:",
        LEASES,
    ),
    Mutant(
        "P7 samples of a peer that is lost for good are leased again",
        "coordinator/run/lending.py",
        "if left or core.now - since >= patience_s:",
        "if left:",
        LEASES,
    ),
    Mutant(
        "P7 nothing is handed out while a former self may yet be acknowledged",
        "coordinator/run/lending.py",
        "if any(c.may_use_work_of(member.peer) and not c.counts_on(member) for c in self._conductors):",
        "if False:",
        LEASES,
    ),
    Mutant(
        "P5 the journal survives a power cut",
        "coordinator/ledger/journal.py",
        "PRAGMA synchronous=FULL",
        "PRAGMA synchronous=OFF",
        JOURNAL,
    ),
    Mutant(
        "P5 a lost record does not pass unnoticed",
        "coordinator/ledger/journal.py",
        "if pos != self._position + 1:",
        "if False:",
        JOURNAL,
    ),
    Mutant(
        "P5 a copy of a journal is not a journal",
        "coordinator/ledger/journal.py",
        "if known is not None and not self.restored:",
        "if False:",
        JOURNAL,
    ),
    Mutant(
        "what is evidence of a hash list is signed by its author",
        "coordinator/ledger/evidence.py",
        "if not is_signed(said.identity, self.run_id, said.sent):",
        "if False:",
        ("tests/coordinator/ledger/test_evidence.py",),
    ),
)

ARITHMETIC = (
    Mutant(
        "P1 owners add in the order of the plan",
        "collectives/round/member.py",
        "counted = [(m, w) for m, w in zip(self.plan.members, self.decision.weights, strict=True) if w > 0.0]",
        "counted = [(m, w) for m, w in zip(self.plan.members, self.decision.weights, strict=True) if w > 0.0][::-1]",
        (*MEMBER, "tests/whole/test_diloco_reference.py"),
    ),
    Mutant(
        "a result comes from the owner of its chunk",
        "collectives/round/member.py",
        "if sender != self.plan.owner_of(chunk):",
        "if False:",
        MEMBER,
    ),
    Mutant(
        "a decision is followed by newer ones alone",
        "collectives/round/member.py",
        "if self.decision is not None and decision.decision_no <= self.decision.decision_no:",
        "if False:",
        MEMBER,
    ),
    Mutant(
        "results of an earlier decision have other weights",
        "collectives/round/member.py",
        "self.results.clear()  # results",
        "pass  # results",
        MEMBER,
    ),
    Mutant(
        "who sent useless bytes is not heard again in this round",
        "collectives/round/member.py",
        "if sender in self.refused:",
        "if False:",
        MEMBER,
    ),
    Mutant(
        "contributions count by their weights",
        "collectives/arithmetic/merge.py",
        "codec_of(payload).decode_add(payload, weight, total_n)",
        "codec_of(payload).decode_add(payload, 1.0, total_n)",
        ("tests/whole/test_diloco_reference.py",),
    ),
    Mutant(
        "the outer step looks ahead by its momentum",
        "optim/outer.py",
        "update_n = m_n.mul(mu).add_(d_n).mul_(lr)",
        "update_n = m_n.mul(lr)",
        ("tests/optim/test_outer.py",),
    ),
    Mutant(
        "the error feedback decays by beta",
        "compression/feedback.py",
        "self._residual_n.mul_(self._beta).add_(delta_n)",
        "self._residual_n.add_(delta_n)",
        FEEDBACK,
    ),
    Mutant(
        "what was sent is no residual",
        "compression/feedback.py",
        "codec.decode_add(payload, -1.0, part_n)",
        "pass",
        FEEDBACK,
    ),
    Mutant(
        "the residual is kept only of what a commit used",
        "peer/state/outer_state.py",
        "        if used:",
        "        if True:",
        ("tests/peer/test_worker.py", *FEEDBACK),
    ),
    Mutant(
        "P1 a digest is of parameters and moments",
        "peer/state/outer_state.py",
        "return [part[chunk].numpy().view(np.uint8).data for part in self._parts]",
        "return [part[chunk].numpy().view(np.uint8).data for part in self._parts[:1]]",
        ("tests/peer/test_worker.py", "tests/whole/test_fragments.py"),
    ),
    Mutant(
        "P1 AdamW corrects for the version that it makes",
        "peer/state/outer_state.py",
        "for part in self._parts], delta_n, effect.version)",
        "for part in self._parts], delta_n, effect.version + 1)",
        ("tests/coordinator/court/test_plain_steps.py",),
    ),
    Mutant(
        "P1 AdamW bounds what it squares",
        "optim/adamw.py",
        "g_n = d_n.clamp(-GRADIENT_MOST, GRADIENT_MOST)",
        "g_n = d_n.clone()",
        ("tests/optim/test_adamw.py",),
    ),
    Mutant(
        "P18 the court counts the versions since what a chunk was",
        "coordinator/court/dispute.py",
        "enumerate(results, attempt.base + 1)",
        "enumerate(results, attempt.base)",
        ("tests/coordinator/court/test_dispute.py",),
    ),
    Mutant(
        "P18 a proof counts the versions since what the chunk was",
        "coordinator/ledger/proofs.py",
        "enumerate(self.results, self.base + 1)",
        "enumerate(self.results, self.base)",
        ("tests/coordinator/ledger/test_proofs.py",),
    ),
    Mutant(
        "a checkpoint has all parts of a state",
        "peer/state/checkpoint_writer.py",
        "parts=3 if facts.attached.form.parts == ADAMW_PARTS else UNSET,",
        "parts=UNSET,",
        ("tests/peer/state/test_checkpoint_writer.py",),
    ),
    Mutant(
        "NaN is not encoded",
        "compression/tiles.py",
        "if peaks.numel() == 0 or bool(torch.isfinite(peaks.amax())):",
        "if True:",
        ("tests/compression/test_codecs.py",),
    ),
)

STATE = (
    Mutant(
        "P4 the list of a state's hashes has the run's digest",
        "checkpoints/catch_up.py",
        "if len(hashes) != len(self.versions) or root_of(hashes) != digest:",
        "if len(hashes) != len(self.versions):",
        CATCH_UP,
    ),
    Mutant(
        "P4 a piece of state has the hash that the list says",
        "checkpoints/catch_up.py",
        "if not is_piece(manifest[index], payload, header.hash, self._parts):",
        "if False:",
        CATCH_UP,
    ),
    Mutant(
        "P2 a result is the one that was committed",
        "checkpoints/catch_up.py",
        "if commit is None or payload_hash != commit.hashes[32 * index : 32 * index + 32]:",
        "if commit is None:",
        CATCH_UP,
    ),
    Mutant(
        "P4 pieces of before a crash are of a state that the run knows",
        "checkpoints/catch_up.py",
        "if not digest or not known or digest == known:",
        "if True:",
        (*CATCH_UP, "tests/whole/test_data_plane_bounds.py"),
    ),
    Mutant(
        "a piece on disk is as it was written",
        "checkpoints/arrivals.py",
        "return body if version > 0 and hash_bytes(body) == written else None",
        "return body if version > 0 else None",
        (
            "tests/checkpoints/test_catch_up.py",
            "tests/whole/test_joining_live.py",
            "tests/peer/test_worker.py",
            "tests/whole/test_data_plane_bounds.py",
        ),
    ),
    Mutant(
        "a donor that keeps giving wrong bytes is asked no more",
        "checkpoints/donors.py",
        "good = tuple(d for d in donors if self._spoiled.get(d, 0) <= SPOILED_FORGIVEN)",
        "good = donors",
        CATCH_UP,
    ),
    Mutant(
        "a checkpoint's chunks have their hashes",
        "checkpoints/store.py",
        "if chunk_hash(piece) != hashes[chunk]:",
        "if False:",
        STORE,
    ),
    Mutant(
        "a checkpoint's digest is that of its chunks",
        "checkpoints/checkpoint_manifest.py",
        "if root_of(bytes.fromhex(chunk) for chunk in saved.chunks).hex() != saved.digest:",
        "if False:",
        STORE,
    ),
    Mutant(
        "a checkpoint's file is on the disk before it has its name",
        "checkpoints/files.py",
        "                os.fsync(file.fileno())",
        "                pass",
        STORE,
    ),
    Mutant(
        "P4 only confirmed state is served",
        "peer/machine/lane.py",
        "return isinstance(self._stand, Whole) and self._stand.verified",
        "return isinstance(self._stand, Whole)",
        LANE,
    ),
    Mutant(
        "P6 a commit used my work when I am in it",
        "peer/machine/lane.py",
        "if mine.round_no == commit.round_no and self._me in commit.included:",
        "if mine.round_no == commit.round_no:",
        LANE,
    ),
    Mutant(
        "a run that goes back keeps what is exactly its state",
        "peer/machine/lane.py",
        "keep = isinstance(stand, Whole) and (stand.version, stand.digest) == (version, digest)",
        "keep = isinstance(stand, Whole)",
        (*LANE[:2], *GOING_BACK[1:]),
    ),
    Mutant(
        "P6 work that a commit used is taken from what the trainer holds, once",
        "peer/machine/exchange.py",
        "taken = consumed.frozen if consumed is not None and not consumed.disowned else None",
        "taken = None",
        LANE,
    ),
    Mutant(
        "a freeze that crossed a load does not count",
        "peer/machine/trainer_view.py",
        "if self.loading:\n            # It crossed",
        "if False:\n            # It crossed",
        TRAINER,
    ),
    Mutant(
        "a slot that a round uses is not written",
        "peer/machine/trainer_view.py",
        "return min({0, 1, 2} - taken)",
        "return 0",
        TRAINER,
    ),
    Mutant(
        "nobody follows a coordinator that another one has replaced",
        "peer/machine/getting_in.py",
        "if not self._awaits_welcome or welcome.incarnation < self.incarnation:",
        "if not self._awaits_welcome:",
        ADMISSION,
    ),
)

# The simulator's liars: whole runs, in which whoever is honest keeps its state.
COURT = (
    "tests/coordinator/court/test_possession.py",
    "tests/coordinator/court/test_dispute.py",
    "tests/coordinator/run/test_settling.py",
    "tests/coordinator/run/test_guidance.py",
    "tests/coordinator/run/test_conductor.py",
    "tests/coordinator/run/test_machine.py",
    "tests/whole/test_liars.py",
)
DATA = ("tests/coordinator/run/test_lending.py", "tests/whole/test_liars_about_work.py")

PROOFS = (
    Mutant(
        "an echo of a digest shows nothing",
        "coordinator/run/settling.py",
        "holds = shows and bool(value) and value == book.shown.get(said.version)",
        "holds = shows",
        COURT,
    ),
    Mutant(
        "what a member shows is shown under the version's nonce",
        "coordinator/court/possession.py",
        "fits = len(said) == TAG_BYTES + HASH_BYTES and said[:TAG_BYTES] == nonce[:TAG_BYTES]",
        "fits = len(said) == TAG_BYTES + HASH_BYTES",
        COURT,
    ),
    Mutant(
        "who never held the run's state does not say what it is",
        "coordinator/run/settling.py",
        "(member, said) for member, said in speakers if member.peer in book.vouched and said.version >= 0",
        "(member, said) for member, said in speakers if said.version >= 0",
        COURT,
    ),
    Mutant(
        "a digest is contested, whoever came first",
        "coordinator/run/settling.py",
        "if version and (len(claims) > 1 or undefended):",
        "if version and undefended:",
        COURT,
    ),
    Mutant(
        "the hashes that prove possession are the run's",
        "coordinator/court/possession.py",
        "if len(hashes) != held.fragment.count or root_of(hashes) != held.digest:",
        "if len(hashes) != held.fragment.count:",
        COURT,
    ),
    Mutant(
        "the chunk that proves possession is the run's",
        "coordinator/court/possession.py",
        "if hash_bytes(raw) != self._hashes[drawn_chunk(held.nonce, held.fragment.count)]:",
        "if False:",
        COURT,
    ),
    Mutant(
        "a list of hashes is that of the digest that was named",
        "coordinator/court/dispute.py",
        "if len(hashes) != self.case.fragment.count or root_of(hashes) != digest:",
        "if len(hashes) != self.case.fragment.count:",
        COURT,
    ),
    Mutant(
        "a list of hashes is signed by who shows it",
        "coordinator/court/dispute.py",
        "elif not self.case.is_signed(answer.of, digest, answer.signature):",
        "elif False:",
        COURT,
    ),
    Mutant(
        "a dispute begins from a settled state",
        "coordinator/court/dispute.py",
        "elif self._base_lists[attempt.base][chunk - case.fragment.first] != hash_bytes(attempt.before):",
        "elif False:",
        COURT,
    ),
    Mutant(
        "a dispute goes on with the results that were committed",
        "coordinator/court/dispute.py",
        "if hash_bytes(raw) != split_hashes(self.case.commits[wanted.version].hashes)[index]:",
        "if False:",
        COURT,
    ),
    Mutant(
        "who calculated what it holds keeps it, whatever others say",
        "peer/machine/lane.py",
        "differs = refuted or (differs and not self._grounds.calculated)",
        "differs = refuted or differs",
        ("tests/peer/machine/test_lane.py", "tests/peer/machine/test_grounds.py", *COURT[4:]),
    ),
    Mutant(
        "what is proven wrong is given up",
        "peer/machine/lane.py",
        "refuted = bool(tick.refuted) and tick.refuted == self.digest and self.whole",
        "refuted = False",
        ("tests/peer/machine/test_lane.py", "tests/peer/machine/test_grounds.py", *COURT[4:]),
    ),
    Mutant(
        "tokens count as far as they are likely",
        "coordinator/rounds/weighting.py",
        "if tokens[name] > most > 0.0:",
        "if False:",
        ("tests/coordinator/rounds/test_weighting.py", *WEIGHTS, *DATA[1:]),
    ),
    Mutant(
        "one member ends no stream for all",
        "coordinator/run/data_words.py",
        "if 2 * weight <= weights.total() or length == UNKNOWN_LENGTH:",
        "if length == UNKNOWN_LENGTH:",
        DATA,
    ),
    Mutant(
        "the run's data is that of the most members, not of the first",
        "coordinator/run/data_words.py",
        "samples = max(lengths, key=lengths.__getitem__, default=0)",
        "samples = next(iter(lengths), 0)",
        DATA,
    ),
)

CROSSINGS = (
    Mutant(
        "what may have been passed on before waits until all have said what they hold",
        "collectives/flow/flow.py",
        "        return not silent\n",
        "        return True\n",
        FLOW,
    ),
    Mutant(
        "newcomers hear what is held of who is gone",
        "collectives/flow/flow.py",
        "table.last_loss(self._stage - 1), table.last_change(self._stage - 1)",
        "table.last_loss(self._stage - 1), table.last_loss(self._stage - 1)",
        FLOW,
    ),
    Mutant(
        "a frame from before my seat was meant for another seat of my peer",
        "collectives/flow/gate.py",
        "    if table_of(header) < mine.since:\n",
        "    if table_of(header) < 0:\n",
        FLOW,
    ),
)

MUTANTS = (*FRAMES, *DOOR, *ROUNDS, *RUN, *ARITHMETIC, *STATE, *PROOFS, *CROSSINGS)
