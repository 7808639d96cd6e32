/* The lab's network, compiled: what network.py, shaping.py and packets.py do, and router.py's loop around it.

   Called by fast.py alone, which owns the specs and all chance: losses and jitter are asked of it by callback.
   The Python files are the model; tests/lab/test_fast.py holds this file to them, parcel by parcel and bit by bit.
   So the order of every sum of doubles is theirs, and whoever changes one side changes the other. */

#define _GNU_SOURCE
#include <errno.h>
#include <math.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { VNET_BYTES = 10, PACKET_MOST = 65535 + VNET_BYTES, READS_IN_A_ROW = 64, HOSTS_MOST = 128, WATCHED_MOST = 4 };
enum { CWR = 0x80, PSH = 0x08, FIN = 0x01 };
static const double TURN_S = 0.0005;

typedef struct {
    uint8_t *data; /* virtio_net_hdr and IPv4 packet; whoever holds the parcel frees it */
    uint32_t bytes, segments, segment_bytes, headers_bytes, wire_bytes;
    int target;
} Parcel;

typedef struct {
    double due_s, left_s;
    Parcel parcel;
} Flying;

typedef struct {
    int number; /* 2 * host, and 1 more for the line down: what callbacks name */
    double byte_s, delay_s, until_loss, busy_until_s;
    int64_t queue_bytes, at_once;
    int has_jitter;
    Flying *ring; /* `count` of them from `first` on */
    size_t room, first, count;
    int64_t delivered_bytes, delivered, lost, dropped, cut; /* in the order of shaping.Counters */
} Line;

typedef double (*Draw)(int line);
typedef double (*Jitter)(int line, double left_s);
typedef int (*Sink)(void *to, int target, const uint8_t *data, uint32_t bytes);

typedef struct {
    int hosts;
    Line *lines; /* up and down of each host in turn */
    uint8_t *mute, *deaf, *cut_pairs;
    double worst_late_s;
    Draw until_loss;
    Jitter jitter;
    struct Crossing *crossing; /* room for those that go over from the lines up to the lines down */
    size_t crossing_room;
} Network;

typedef struct Crossing {
    double due_s;
    int source;
    Parcel parcel;
} Crossing;

static void *must(void *got) {
    if (!got) {
        fputs("the lab's router has no memory left\n", stderr);
        abort();
    }
    return got;
}

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* ---- packets.py ------------------------------------------------------------------------------------------------ */

static uint16_t read16(const uint8_t *at) { return (uint16_t)(at[0] << 8 | at[1]); }

static void write16(uint8_t *at, uint32_t value) {
    at[0] = (uint8_t)(value >> 8);
    at[1] = (uint8_t)value;
}

/* The sum of RFC 1071 before its last inversion. */
static uint32_t folded(const uint8_t *data, uint32_t bytes) {
    uint32_t total = 0;
    for (uint32_t at = 0; at < bytes; at += 2)
        total += read16(data + at);
    while (total > 0xFFFF)
        total = (total & 0xFFFF) + (total >> 16);
    return total;
}

/* Takes the bytes over. */
static Parcel parcel_of(uint8_t *data, uint32_t bytes, int target) {
    Parcel made = {data, bytes, 1, 0, 0, bytes - VNET_BYTES, target};
    if (data[1]) { /* gso_type */
        uint32_t ip_bytes = (data[VNET_BYTES] & 15u) * 4;
        uint16_t segment_bytes;
        memcpy(&segment_bytes, data + 4, 2);
        made.headers_bytes = ip_bytes + (uint32_t)(data[VNET_BYTES + ip_bytes + 12] >> 4) * 4;
        made.segment_bytes = segment_bytes;
        uint32_t payload_bytes = made.wire_bytes - made.headers_bytes;
        made.segments = (payload_bytes + segment_bytes - 1) / segment_bytes;
        if (made.segments < 1)
            made.segments = 1;
        made.wire_bytes += (made.segments - 1) * made.headers_bytes;
    }
    return made;
}

static Parcel slice(const Parcel *of, uint32_t start, uint32_t stop) {
    int last = stop == of->segments;
    uint32_t begin = VNET_BYTES + of->headers_bytes + start * of->segment_bytes;
    uint32_t end = last ? of->bytes : begin + (stop - start) * of->segment_bytes;
    uint32_t payload_bytes = end - begin, bytes = VNET_BYTES + of->headers_bytes + payload_bytes;
    uint8_t *data = must(malloc(bytes)), *ip = data + VNET_BYTES;
    memcpy(data, of->data, VNET_BYTES + of->headers_bytes);
    memcpy(ip + of->headers_bytes, of->data + begin, payload_bytes);
    uint16_t headers_bytes = (uint16_t)of->headers_bytes;
    memcpy(data + 2, &headers_bytes, 2);
    if (stop - start == 1)
        memset(data + 1, 0, 1), memset(data + 4, 0, 2); /* gso_type, gso_size */
    uint32_t ip_bytes = (ip[0] & 15u) * 4;
    uint8_t *tcp = ip + ip_bytes;
    uint32_t sequence = ((uint32_t)read16(tcp + 4) << 16 | read16(tcp + 6)) + start * of->segment_bytes;
    write16(ip + 2, of->headers_bytes + payload_bytes);
    write16(ip + 4, read16(ip + 4) + start);
    write16(ip + 10, 0);
    write16(ip + 10, folded(ip, ip_bytes) ^ 0xFFFF);
    write16(tcp + 4, sequence >> 16);
    write16(tcp + 6, sequence);
    if (start)
        tcp[13] &= (uint8_t)~CWR;
    if (!last)
        tcp[13] &= (uint8_t) ~(PSH | FIN);
    uint8_t pseudo[12];
    memcpy(pseudo, ip + 12, 8);
    pseudo[8] = 0;
    pseudo[9] = ip[9];
    write16(pseudo + 10, of->headers_bytes - ip_bytes + payload_bytes);
    write16(tcp + 16, folded(pseudo, 12));
    return parcel_of(data, bytes, of->target);
}

/* ---- shaping.py ------------------------------------------------------------------------------------------------ */

static Flying *flying_at(const Line *line, size_t place) { return &line->ring[(line->first + place) % line->room]; }

static void append(Line *line, Flying one) {
    if (line->count == line->room) {
        size_t room = line->room ? 2 * line->room : 64;
        Flying *ring = must(malloc(room * sizeof *ring));
        for (size_t place = 0; place < line->count; place++)
            ring[place] = *flying_at(line, place);
        free(line->ring);
        line->ring = ring;
        line->room = room;
        line->first = 0;
    }
    line->ring[(line->first + line->count++) % line->room] = one;
}

static Flying take_first(Line *line) {
    Flying one = line->ring[line->first];
    line->first = (line->first + 1) % line->room;
    line->count--;
    line->delivered_bytes += one.parcel.wire_bytes;
    line->delivered += one.parcel.segments;
    return one;
}

static double due_s(const Line *line) { return line->count ? line->ring[line->first].due_s : INFINITY; }

static void enqueue(Network *net, Line *line, Parcel parcel, double at_s) {
    double starts_s = line->busy_until_s > at_s ? line->busy_until_s : at_s;
    double room_bytes = (double)line->queue_bytes - (starts_s - at_s) * line->byte_s;
    if ((double)parcel.wire_bytes > room_bytes) {
        double share = room_bytes * parcel.segments / parcel.wire_bytes;
        uint32_t fitting = share > 0 ? (uint32_t)share : 0;
        line->dropped += parcel.segments - fitting;
        if (fitting) {
            if (fitting < parcel.segments) {
                Parcel part = slice(&parcel, 0, fitting);
                free(parcel.data);
                parcel = part;
            }
        } else {
            free(parcel.data);
            return;
        }
    }
    double left_s = line->busy_until_s = starts_s + parcel.wire_bytes / line->byte_s;
    double arrives_s = left_s + line->delay_s;
    if (line->has_jitter)
        arrives_s += net->jitter(line->number, left_s);
    append(line, (Flying){arrives_s, left_s, parcel});
}

static void push_in_pieces(Network *net, Line *line, Parcel parcel, double at_s) {
    uint32_t start = 0;
    while (start < parcel.segments) {
        double most = parcel.segments - start;
        if ((double)line->at_once < most)
            most = (double)line->at_once;
        if (line->until_loss < most)
            most = line->until_loss;
        uint32_t count = (uint32_t)most;
        if (!count) {
            line->lost++;
            line->until_loss = net->until_loss(line->number);
            start++;
        } else if (count == parcel.segments) {
            line->until_loss -= count;
            enqueue(net, line, parcel, at_s);
            return;
        } else {
            line->until_loss -= count;
            enqueue(net, line, slice(&parcel, start, start + count), at_s);
            start += count;
        }
    }
    free(parcel.data);
}

static void push(Network *net, Line *line, Parcel parcel, double at_s) {
    if (parcel.segments <= line->until_loss && parcel.segments <= line->at_once) {
        line->until_loss -= parcel.segments;
        enqueue(net, line, parcel, at_s);
    } else {
        push_in_pieces(net, line, parcel, at_s);
    }
}

static void take_rate(Line *line, double byte_s, int64_t queue_bytes, int64_t at_once) {
    line->byte_s = byte_s;
    line->queue_bytes = queue_bytes;
    line->at_once = at_once;
}

static void set_line_rate(Line *line, double byte_s, int64_t queue_bytes, int64_t at_once, double at_s) {
    double slower = line->byte_s / byte_s;
    for (size_t place = 0; place < line->count; place++) {
        Flying *one = flying_at(line, place);
        if (one->left_s > at_s) {
            double left_s = at_s + (one->left_s - at_s) * slower;
            one->due_s = one->due_s + left_s - one->left_s;
            one->left_s = left_s;
        }
    }
    double busy_s = line->busy_until_s - at_s;
    line->busy_until_s = at_s + (busy_s > 0 ? busy_s : 0.0) * slower;
    take_rate(line, byte_s, queue_bytes, at_once);
}

static void clear(Line *line) {
    for (; line->count; line->count--) {
        Flying *one = flying_at(line, line->count - 1);
        line->cut += one->parcel.segments;
        free(one->parcel.data);
    }
    line->busy_until_s = 0.0;
}

/* ---- network.py ------------------------------------------------------------------------------------------------ */

static Line *up(Network *net, int host) { return &net->lines[2 * host]; }
static Line *down(Network *net, int host) { return &net->lines[2 * host + 1]; }

static void lose_to_cut(Line *line, Parcel parcel) {
    line->cut += parcel.segments;
    free(parcel.data);
}

/* From the lines up to the lines down, in the order of arrival, whoever sent them. */
static void cross(Network *net, double at_s) {
    size_t found = 0;
    for (int source = 0; source < net->hosts; source++) {
        Line *line = up(net, source);
        while (due_s(line) <= at_s) {
            if (found == net->crossing_room) {
                net->crossing_room = found ? 2 * found : 64;
                net->crossing = must(realloc(net->crossing, net->crossing_room * sizeof *net->crossing));
            }
            Flying one = take_first(line);
            size_t place = found++;
            /* Each line's are in order already, so few move, and those with equal times stay as they were. */
            for (; place && net->crossing[place - 1].due_s > one.due_s; place--)
                net->crossing[place] = net->crossing[place - 1];
            net->crossing[place] = (Crossing){one.due_s, source, one.parcel};
        }
    }
    for (size_t place = 0; place < found; place++) {
        Crossing one = net->crossing[place];
        int target = one.parcel.target;
        if (net->deaf[target] || net->cut_pairs[one.source * net->hosts + target])
            lose_to_cut(down(net, target), one.parcel);
        else
            push(net, down(net, target), one.parcel, one.due_s);
    }
}

Network *lab_new(int hosts, Draw until_loss, Jitter jitter) {
    Network *net = must(calloc(1, sizeof *net));
    net->hosts = hosts;
    net->lines = must(calloc((size_t)(2 * hosts), sizeof *net->lines));
    net->mute = must(calloc((size_t)hosts, 1));
    net->deaf = must(calloc((size_t)hosts, 1));
    net->cut_pairs = must(calloc((size_t)(hosts * hosts), 1));
    net->until_loss = until_loss;
    net->jitter = jitter;
    return net;
}

void lab_free(Network *net) {
    for (int number = 0; number < 2 * net->hosts; number++) {
        clear(&net->lines[number]);
        free(net->lines[number].ring);
    }
    free(net->lines);
    free(net->mute);
    free(net->deaf);
    free(net->cut_pairs);
    free(net->crossing);
    free(net);
}

void lab_set_line(
    Network *net, int number, double byte_s, int64_t queue_bytes, int64_t at_once, double delay_s, int has_jitter
) {
    Line *line = &net->lines[number];
    line->number = number;
    line->delay_s = delay_s;
    line->has_jitter = has_jitter;
    line->until_loss = net->until_loss(number);
    take_rate(line, byte_s, queue_bytes, at_once);
}

void lab_set_rate(Network *net, int number, double byte_s, int64_t queue_bytes, int64_t at_once, double at_s) {
    cross(net, at_s);
    set_line_rate(&net->lines[number], byte_s, queue_bytes, at_once, at_s);
}

static void send_parcel(Network *net, int source, Parcel parcel, double at_s) {
    if (net->mute[source])
        lose_to_cut(up(net, source), parcel);
    else
        push(net, up(net, source), parcel, at_s);
}

void lab_send(Network *net, int source, int target, const uint8_t *data, uint32_t bytes, double at_s) {
    uint8_t *own = must(malloc(bytes));
    memcpy(own, data, bytes);
    send_parcel(net, source, parcel_of(own, bytes, target), at_s);
}

int lab_deliver(Network *net, double at_s, Sink sink, void *to) {
    int failed = 0;
    cross(net, at_s);
    for (int host = 0; host < net->hosts; host++) {
        Line *line = down(net, host);
        while (due_s(line) <= at_s) {
            Flying one = take_first(line);
            if (at_s - one.due_s > net->worst_late_s)
                net->worst_late_s = at_s - one.due_s;
            failed = sink(to, one.parcel.target, one.parcel.data, one.parcel.bytes);
            free(one.parcel.data);
            if (failed)
                return failed;
        }
    }
    return 0;
}

double lab_due_s(Network *net) {
    double least_s = INFINITY;
    for (int host = 0; host < net->hosts; host++) {
        Line *line = up(net, host);
        if (line->count) {
            double crossing_s = due_s(line) + down(net, line->ring[line->first].parcel.target)->delay_s;
            least_s = crossing_s < least_s ? crossing_s : least_s;
        }
        line = down(net, host);
        least_s = due_s(line) < least_s ? due_s(line) : least_s;
    }
    return least_s;
}

void lab_cut(Network *net, int source, int target, int one_way, double at_s) {
    cross(net, at_s);
    if (target >= 0) {
        net->cut_pairs[source * net->hosts + target] = 1;
        if (!one_way)
            net->cut_pairs[target * net->hosts + source] = 1;
        return;
    }
    net->mute[source] = 1;
    clear(up(net, source));
    if (!one_way) {
        net->deaf[source] = 1;
        clear(down(net, source));
    }
}

void lab_heal(Network *net, int source, int target, double at_s) {
    cross(net, at_s);
    if (target < 0)
        net->mute[source] = net->deaf[source] = 0;
    else
        net->cut_pairs[source * net->hosts + target] = net->cut_pairs[target * net->hosts + source] = 0;
}

void lab_counters(Network *net, int number, int64_t out[5]) {
    Line *line = &net->lines[number];
    int64_t found[5] = {line->delivered_bytes, line->delivered, line->lost, line->dropped, line->cut};
    memcpy(out, found, sizeof found);
}

double lab_take_worst_late_s(Network *net) {
    double worst_s = net->worst_late_s;
    net->worst_late_s = 0.0;
    return worst_s;
}

/* ---- router.py ------------------------------------------------------------------------------------------------- */

static int write_to_device(void *to, int target, const uint8_t *data, uint32_t bytes) {
    const int *tun_fds = to;
    return write(tun_fds[target], data, bytes) < 0 ? -errno : 0;
}

static int read_device(Network *net, int source, const int *tun_fds, const uint32_t *addresses) {
    static uint8_t data[PACKET_MOST];
    double at_s = now_s();
    for (int turn = 0; turn < READS_IN_A_ROW; turn++) {
        ssize_t bytes = read(tun_fds[source], data, sizeof data);
        if (bytes < 0)
            return errno == EAGAIN ? 0 : -errno;
        if (bytes < VNET_BYTES + 20 || data[VNET_BYTES] >> 4 != 4)
            continue;
        uint32_t address;
        memcpy(&address, data + VNET_BYTES + 16, 4);
        for (int target = 0; target < net->hosts; target++)
            if (addresses[target] == address) { /* else multicast, or an address that nobody has */
                lab_send(net, source, target, data, (uint32_t)bytes, at_s);
                break;
            }
    }
    return 0;
}

static void rest_until(double at_s) {
    double rest_s = at_s - now_s();
    if (rest_s > 0) {
        struct timespec rest = {(time_t)rest_s, (long)(1e9 * (rest_s - floor(rest_s)))};
        nanosleep(&rest, NULL);
    }
}

/* Carry packets until one of the watched files can be read.  0, or -errno of what failed; `addresses` as on the wire. */
int lab_carry(Network *net, const int *tun_fds, const uint32_t *addresses, const int *watched, int watched_count) {
    struct pollfd files[HOSTS_MOST + WATCHED_MOST];
    int hosts = net->hosts, all = hosts + watched_count;
    if (hosts > HOSTS_MOST || watched_count > WATCHED_MOST)
        return -E2BIG;
    for (int at = 0; at < all; at++)
        files[at] = (struct pollfd){at < hosts ? tun_fds[at] : watched[at - hosts], POLLIN, 0};
    for (;;) {
        double wait_s = lab_due_s(net) - now_s();
        struct timespec wait = {0, 0};
        if (wait_s > 0 && wait_s < INFINITY) {
            wait.tv_sec = (time_t)wait_s;
            wait.tv_nsec = (long)(1e9 * (wait_s - floor(wait_s)));
        }
        if (ppoll(files, (nfds_t)all, wait_s == INFINITY ? NULL : &wait, NULL) < 0 && errno != EINTR)
            return -errno;
        double turned_s = now_s();
        int failed = 0;
        for (int host = 0; host < hosts && !failed; host++)
            if (files[host].revents)
                failed = read_device(net, host, tun_fds, addresses);
        if (!failed)
            failed = lab_deliver(net, now_s(), write_to_device, (void *)tun_fds);
        if (failed)
            return failed;
        for (int at = hosts; at < all; at++)
            if (files[at].revents)
                return 0;
        rest_until(turned_s + TURN_S);
    }
}
