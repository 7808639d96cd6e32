/* The arithmetic of the block codecs, compiled on the machine that runs it.

   Owns: one pass over a chunk for each of encode, decode, decode_add and check, for int8, int4, int2, topk and sparse;
   and the outer step of optim/outer.py, which is here because one library is enough.
   Called by: native.py, which has it compiled, and uses it only where it gives the bytes of the plain path.
   Must not know: Python, headers of payloads, threads.  No memory is taken here and nothing is kept between calls.

   Exactness follows from the rules in plain_codecs.py.  Each floating point operation below rounds once: the flags in
   native.py forbid fused operations and any other order.  Maxima are taken over bits, where NaN and infinity
   are the largest.  Loops have fixed lengths and no branches, so that a compiler turns them into vector code.

   Steps and codes lie in a frame, at any address, so they are moved as bytes.  `elements` may end inside a block:
   then the block is padded with zeros, or what lies beyond is not written.  Every payload has been checked before it
   is decoded, and no payload makes these functions read or write elsewhere: places in a row have 12 bits. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define MAGNITUDE 0x7FFFFFFF
#define INFINITE 0x7F800000
#define LEAST_NORMAL_BITS 0x00800000
#define MIN_STEP 0x1p-125f
#define MIN_STEP_BITS (2 << 8)
#define DROPPED_BITS 15
/* Added to a small number it leaves the nearest integer, ties to even, in the lowest bits of the sum. */
#define TO_INTEGER 0x1.8p23f

static inline int32_t bits_of(float value) {
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float value_of(int32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline int32_t peak_bits(const float *values, int count) {
    int32_t peak = 0;
    for (int i = 0; i < count; i++) {
        int32_t magnitude = bits_of(values[i]) & MAGNITUDE;
        peak = magnitude > peak ? magnitude : peak;
    }
    return peak;
}

static inline float rounded_step(float step) {
    uint32_t bits = (uint32_t)bits_of(step) + (1u << (DROPPED_BITS - 1));
    return value_of((int32_t)(bits >> DROPPED_BITS << DROPPED_BITS));
}

static inline int32_t most_step_bits(float largest_level) {
    return bits_of(0x1.fffffep127f / largest_level) >> DROPPED_BITS;
}

static inline void put_step(uint8_t *at, float step) {
    uint16_t bits = (uint16_t)((uint32_t)bits_of(step) >> DROPPED_BITS);
    memcpy(at, &bits, sizeof bits);
}

static inline float get_step(const uint8_t *at) {
    uint16_t bits;
    memcpy(&bits, at, sizeof bits);
    return value_of((int32_t)((uint32_t)bits << DROPPED_BITS));
}

static int steps_are_valid(const uint8_t *steps, int64_t blocks, float largest_level, int may_be_zero) {
    int32_t most = most_step_bits(largest_level), wrong = 0;
    for (int64_t i = 0; i < blocks; i++) {
        uint16_t bits;
        memcpy(&bits, steps + 2 * i, sizeof bits);
        wrong |= (bits < MIN_STEP_BITS || bits > most) && !(may_be_zero && bits == 0);
    }
    return !wrong;
}

/* The root mean square of 64 values; the sum is added half to half, as in plain_codecs.py. */
static inline float rms_of_64(const float *values, float peak, float count) {
    float scale = value_of(bits_of(peak) & INFINITE);
    scale = scale < 0x1p-126f ? 0x1p-126f : scale > 0x1p126f ? 0x1p126f : scale;
    float inverse = 1.0f / scale, sixteen[16], eight[8], four[4];
    for (int i = 0; i < 16; i++) {
        float first = values[i] * inverse, second = values[i + 16] * inverse;
        float third = values[i + 32] * inverse, fourth = values[i + 48] * inverse;
        sixteen[i] = (first * first + third * third) + (second * second + fourth * fourth);
    }
    for (int i = 0; i < 8; i++) eight[i] = sixteen[i] + sixteen[i + 8];
    for (int i = 0; i < 4; i++) four[i] = eight[i] + eight[i + 4];
    return sqrtf(((four[0] + four[2]) + (four[1] + four[3])) / count) * scale;
}

/* ---- int8, and the codes that int4 takes from it -------------------------------------------------------------- */

static inline float int8_step(const float *values, int filled, int32_t peak, uint8_t *codes) {
    (void)values, (void)filled, (void)codes;
    float step = value_of(peak) * (8454660 * 0x1p-30f);
    return rounded_step(step > MIN_STEP ? step : MIN_STEP);
}

static inline void nearest_integers(const float *values, int count, float step, uint8_t *codes) {
    float inverse = 1.0f / step;
    for (int i = 0; i < count; i++) {
        float quotient = values[i] * inverse;
        codes[i] = (uint8_t)bits_of(quotient + TO_INTEGER);
    }
}

static inline void int8_codes(const float *values, float step, uint8_t *codes) {
    nearest_integers(values, 256, step, codes);
}

static inline void int8_restore(float step, const uint8_t *codes, float *out) {
    for (int i = 0; i < 256; i++) out[i] = (float)(int8_t)codes[i] * step;
}

static int int8_codes_are_valid(const uint8_t *codes, int64_t blocks) {
    uint8_t wrong = 0;
    for (int64_t i = 0; i < blocks * 256; i++) wrong |= codes[i] == 0x80;
    return !wrong;
}

/* Each pair of bytes to one: the second is moved down, beside the bits that the first one uses. */
static inline void pack(const uint8_t *bytes, int pairs, int shift, uint8_t *out) {
    for (int i = 0; i < pairs; i++) {
        uint16_t pair;
        memcpy(&pair, bytes + 2 * i, sizeof pair);
        out[i] = (uint8_t)(pair | pair >> shift);
    }
}

/* ---- int4 ------------------------------------------------------------------------------------------------------ */

#define int4_step int8_step

static inline void int4_codes(const float *values, float step, uint8_t *packed) {
    /* The largest integer that is nearer to level k than to level k + 1.  Levels differ by odd numbers: no ties. */
    static const int8_t last[15] = {-108, -78, -59, -44, -31, -18, -6, 5, 15, 25, 36, 48, 63, 81, 108};
    uint8_t integers[64], nibbles[64];
    nearest_integers(values, 64, step, integers);
    for (int i = 0; i < 64; i++) {
        int8_t integer = (int8_t)integers[i];
        uint8_t nibble = 0;
        for (int k = 0; k < 15; k++) nibble = (uint8_t)(nibble + (integer > last[k]));
        nibbles[i] = nibble;
    }
    pack(nibbles, 32, 4, packed);
}

static inline void int4_restore(float step, const uint8_t *packed, float *out) {
    static const uint8_t gaps[15] = {39, 21, 17, 13, 13, 13, 11, 11, 9, 11, 11, 13, 17, 19, 35};
    uint16_t pairs[32];
    uint8_t nibbles[64];
    for (int i = 0; i < 32; i++) pairs[i] = (uint16_t)((packed[i] | packed[i] << 4) & 0x0F0F);
    memcpy(nibbles, pairs, sizeof nibbles);
    for (int i = 0; i < 64; i++) {
        uint8_t level = (uint8_t)-127;
        for (int k = 0; k < 15; k++) level = (uint8_t)(level + ((uint8_t)-(nibbles[i] > k) & gaps[k]));
        nibbles[i] = level;
    }
    for (int i = 0; i < 64; i++) out[i] = (float)(int8_t)nibbles[i] * step;
}

/* ---- int2 ------------------------------------------------------------------------------------------------------ */

#define INT2_LEAST_STEP 0x1p-100f

static inline float int2_step(const float *values, int filled, int32_t peak, uint8_t *packed) {
    (void)packed;
    float most = value_of(most_step_bits(17.0f) << DROPPED_BITS);
    float step = rounded_step(rms_of_64(values, value_of(peak), (float)filled) * (12079596 * 0x1p-27f));
    step = step > most ? most : step;
    return step < INT2_LEAST_STEP ? 0.0f : step;
}

static inline void int2_codes(const float *values, float step, uint8_t *packed) {
    float border = (step < INT2_LEAST_STEP ? INT2_LEAST_STEP : step) * 11.0f;
    uint8_t codes[64], pairs[32];
    for (int i = 0; i < 64; i++) {
        float level = values[i] / border + 2.0f;
        level = level < 3.0f ? level : 3.0f;
        codes[i] = (uint8_t)(int32_t)(level > 0.0f ? level : 0.0f);
    }
    pack(codes, 32, 6, pairs);
    pack(pairs, 16, 4, packed);
}

static inline void int2_restore(float step, const uint8_t *packed, float *out) {
    uint32_t fours[16];
    uint8_t codes[64];
    for (int i = 0; i < 16; i++) {
        uint32_t pairs = (packed[i] | (uint32_t)packed[i] << 12) & 0x000F000F;
        fours[i] = (pairs | pairs << 6) & 0x03030303;
    }
    memcpy(codes, fours, sizeof codes);
    for (int i = 0; i < 64; i++) {
        int8_t level = (int8_t)(-17 + (codes[i] > 0 ? 12 : 0) + (codes[i] > 1 ? 10 : 0) + (codes[i] > 2 ? 12 : 0));
        out[i] = (float)level * step;
    }
}

/* ---- topk ------------------------------------------------------------------------------------------------------ */

#define ROW 4096
#define TAKEN 64
#define TOPK_LOW 6

/* Places as plain_codecs.py writes them: the lowest bits of each, then bit i + the rest of place i. */
#define PLACES_BYTES(COUNT, LOW) (((COUNT) * (LOW) + (COUNT) + (ROW >> (LOW))) / 8)
#define TOPK_PLACES PLACES_BYTES(TAKEN, TOPK_LOW)

static inline void put_places(const int32_t *places, int count, int low, uint8_t *packed) {
    memset(packed, 0, (size_t)PLACES_BYTES(count, low));
    for (int k = 0; k < count; k++) {
        int at = k * low, high = count * low + k + (places[k] >> low);
        int bits = (places[k] & ((1 << low) - 1)) << at % 8;
        packed[at / 8] |= (uint8_t)bits;
        if (bits >> 8) packed[at / 8 + 1] |= (uint8_t)(bits >> 8);
        packed[high / 8] |= (uint8_t)(1 << high % 8);
    }
}

/* As many places as there are, `count` at most; whatever the bits are, each lies within the row. */
static inline int get_places(const uint8_t *packed, int count, int low, int32_t *places) {
    const uint8_t *highs = packed + count * low / 8;
    int found = 0, bytes = (count + (ROW >> low)) / 8;
    for (int first = 0; first < bytes; first += 8) {
        uint64_t word = 0;
        memcpy(&word, highs + first, (size_t)(bytes - first < 8 ? bytes - first : 8));
        for (; word && found < count; word &= word - 1, found++) {
            int at = found * low, high = 8 * first + __builtin_ctzll(word) - found;
            int bits = (packed[at / 8] | packed[at / 8 + 1] << 8) >> at % 8; /* the byte behind the last is a high one */
            places[found] = (high << low | (bits & ((1 << low) - 1))) & (ROW - 1);
        }
    }
    return found;
}

/* So many, which ascend, and none behind the row: the highest bit is that of a place from 4096 on. */
static inline int places_are_valid(const uint8_t *packed, int count, int low, int32_t *places) {
    int bits = 0, wrong = packed[PLACES_BYTES(count, low) - 1] >> 7;
    for (int i = count * low / 8; i < PLACES_BYTES(count, low); i++) bits += __builtin_popcount(packed[i]);
    if (bits != count || get_places(packed, count, low, places) != count) return 0;
    for (int k = 1; k < count; k++) wrong |= places[k] < places[k - 1];
    return !wrong;
}

static inline int count_from(const int32_t *bits, int count, int32_t least) {
    int found = 0;
    for (int i = 0; i < count; i++) found += bits[i] >= least;
    return found;
}

/* The largest number that so many of `bits` reach, found bit by bit; 0 where there are fewer. */
static int32_t border_of(const int32_t *bits, int count, int taken) {
    int32_t border = 0;
    for (int bit = 30; bit >= 0; bit--) {
        int32_t higher = border | (int32_t)1 << bit;
        if (count_from(bits, count, higher) >= taken) border = higher;
    }
    return border;
}

/* Ascending places of the 64 largest; of equal ones the first.  The peaks of 256 groups bound the border from below,
   and few values reach that bound. */
static void largest_places(const int32_t *bits, int32_t *places) {
    int32_t peaks[256], found[ROW], found_places[ROW];
    memcpy(peaks, bits, sizeof peaks);
    for (int r = 256; r < ROW; r += 256)
        for (int i = 0; i < 256; i++) peaks[i] = bits[r + i] > peaks[i] ? bits[r + i] : peaks[i];
    int32_t bound = border_of(peaks, 256, TAKEN);
    int count = 0;
    for (int first = 0; first < ROW; first += 16) {
        if (!count_from(bits + first, 16, bound)) continue;
        for (int i = first; i < first + 16; i++) {
            found[count] = bits[i];
            found_places[count] = i;
            count += bits[i] >= bound;
        }
    }
    int32_t border = border_of(found, count, TAKEN);
    int ties = TAKEN - count_from(found, count, border + 1), taken = 0;
    for (int i = 0; i < count && taken < TAKEN; i++) {
        if (found[i] > border || (found[i] == border && ties-- > 0)) places[taken++] = found_places[i];
    }
}

static float topk_step(const float *values, int filled, int32_t peak, uint8_t *packed) {
    int32_t bits[ROW], places[TAKEN] = {0}, taken[TAKEN], first = ROW - 1, count = 0;
    float present[TAKEN];
    (void)filled;
    for (int i = 0; i < ROW; i++) bits[i] = bits_of(values[i]) & MAGNITUDE;
    largest_places(bits, places);
    for (int k = TAKEN - 1; k >= 0; k--) {
        int there = bits[places[k]] >= LEAST_NORMAL_BITS;
        present[k] = there ? values[places[k]] : 0.0f;
        first = there ? places[k] : first;
        count += there;
    }
    float most = value_of(most_step_bits(40.0f) << DROPPED_BITS);
    float step = rounded_step(rms_of_64(present, value_of(peak), (float)(count ? count : 1)) * 0x1p-5f);
    step = step > most ? most : step;
    step = step < MIN_STEP ? 0.0f : step;
    float border = step * 33.5f;
    int repeated = TAKEN - count; /* the first taken one, in place of those that are no normal numbers */
    for (int k = 0, there = 0; k < TAKEN; k++) {
        while (k >= repeated && bits[places[there]] < LEAST_NORMAL_BITS) there++;
        taken[k] = k < repeated ? first : places[there++];
    }
    put_places(taken, TAKEN, TOPK_LOW, packed);
    packed += TOPK_PLACES;
    memset(packed, 0, TAKEN / 4);
    for (int k = 0; k < TAKEN; k++) {
        int code = (fabsf(values[taken[k]]) >= border) + 2 * (values[taken[k]] <= -0x1p-126f);
        packed[k % 16] |= (uint8_t)(code << k / 16 * 2);
    }
    return step;
}

static inline void topk_codes(const float *values, float step, uint8_t *packed) {
    (void)values, (void)step, (void)packed; /* written with the step, which follows from what is taken */
}

static inline int topk_code(const uint8_t *packed, int k) {
    return packed[TOPK_PLACES + k % 16] >> k / 16 * 2 & 3;
}

static void topk_restore(float step, const uint8_t *packed, float *out) {
    float levels[4] = {27.0f * step, 40.0f * step, -27.0f * step, -40.0f * step};
    int32_t places[TAKEN];
    int count = get_places(packed, TAKEN, TOPK_LOW, places);
    memset(out, 0, ROW * sizeof *out);
    for (int k = 0; k < count; k++) out[places[k]] = levels[topk_code(packed, k)];
}

/* A place may come again, but with its own value. */
static int topk_codes_are_valid(const uint8_t *codes, int64_t blocks) {
    for (int64_t row = 0; row < blocks; row++, codes += TOPK_PLACES + TAKEN / 4) {
        int32_t places[TAKEN];
        if (!places_are_valid(codes, TAKEN, TOPK_LOW, places)) return 0;
        for (int k = 1; k < TAKEN; k++)
            if (places[k] == places[k - 1] && topk_code(codes, k) != topk_code(codes, k - 1)) return 0;
    }
    return 1;
}

/* ---- sparse ---------------------------------------------------------------------------------------------------- */

#define KEPT 240
#define SPARSE_LOW 4
#define SPARSE_PLACES PLACES_BYTES(KEPT, SPARSE_LOW)

/* Ascending places of the 240 largest; of equal ones the first.  Most of a row is zero. */
static void kept_places(const int32_t *bits, int32_t *places) {
    int32_t found[ROW];
    int count = 0, taken = 0;
    for (int first = 0; first < ROW; first += 16) {
        if (!count_from(bits + first, 16, 1)) continue;
        for (int i = first; i < first + 16; i++) {
            found[count] = bits[i];
            count += bits[i] > 0;
        }
    }
    int32_t border = border_of(found, count, KEPT);
    int ties = KEPT - count_from(found, count, border + 1);
    for (int first = 0; first < ROW && taken < KEPT; first += 16) {
        if (!count_from(bits + first, 16, border + (ties <= 0))) continue;
        for (int i = first; i < first + 16 && taken < KEPT; i++)
            if (bits[i] > border || (bits[i] == border && ties-- > 0)) places[taken++] = i;
    }
}

static float sparse_step(const float *values, int filled, int32_t peak, uint8_t *packed) {
    int32_t bits[ROW], places[KEPT] = {0};
    float kept[KEPT];
    for (int i = 0; i < ROW; i++) bits[i] = bits_of(values[i]) & MAGNITUDE;
    kept_places(bits, places);
    for (int k = 0; k < KEPT; k++) kept[k] = values[places[k]];
    float step = int8_step(values, filled, peak, packed);
    put_places(places, KEPT, SPARSE_LOW, packed);
    nearest_integers(kept, KEPT, step, packed + SPARSE_PLACES);
    return step;
}

static inline void sparse_codes(const float *values, float step, uint8_t *packed) {
    (void)values, (void)step, (void)packed; /* written with the step, as those of topk are */
}

static void sparse_restore(float step, const uint8_t *packed, float *out) {
    int32_t places[KEPT];
    int count = get_places(packed, KEPT, SPARSE_LOW, places);
    memset(out, 0, ROW * sizeof *out);
    for (int k = 0; k < count; k++) out[places[k]] = (float)(int8_t)packed[SPARSE_PLACES + k] * step;
}

static int sparse_codes_are_valid(const uint8_t *codes, int64_t blocks) {
    int wrong = 0;
    for (int64_t row = 0; row < blocks && !wrong; row++, codes += SPARSE_PLACES + KEPT) {
        int32_t places[KEPT];
        if (!places_are_valid(codes, KEPT, SPARSE_LOW, places)) return 0;
        for (int k = 1; k < KEPT; k++) wrong |= places[k] == places[k - 1];
        for (int k = 0; k < KEPT; k++) wrong |= codes[SPARSE_PLACES + k] == 0x80;
    }
    return !wrong;
}

/* ---- over a chunk ---------------------------------------------------------------------------------------------- */

static int any_codes_are_valid(const uint8_t *codes, int64_t blocks) {
    (void)codes, (void)blocks;
    return 1;
}

#define GROUP 1024

/* Adds <x_i, x_j> for members i <= j, row by row, to `out`.  `rooms` holds one row of `length` values for each; a
   multiple of 64, so that the sums of 64 lanes are vector code.  Nobody depends on the bits of these sums. */
static void add_products(const float *rooms, int64_t members, int length, double *out) {
    for (int64_t i = 0; i < members; i++) {
        for (int64_t j = i; j < members; j++, out++) {
            const float *a = rooms + i * length, *b = rooms + j * length;
            float lanes[64] = {0}, sum = 0.0f;
            for (int k = 0; k < length; k += 64)
                for (int l = 0; l < 64; l++) lanes[l] += a[k + l] * b[k + l];
            for (int l = 0; l < 64; l++) sum += lanes[l];
            *out += (double)sum;
        }
    }
}

/* `values`: of each member, at any address.  `rooms` has GROUP values for each. */
void fp32_dots(const uint8_t *const *values, int64_t members, int64_t elements, float *rooms, double *out) {
    for (int64_t first = 0; first < elements; first += GROUP) {
        int64_t filled = elements - first < GROUP ? elements - first : GROUP;
        for (int64_t m = 0; m < members; m++) {
            float *room = rooms + m * GROUP;
            memcpy(room, values[m] + first * (int64_t)sizeof *room, (size_t)filled * sizeof *room);
            memset(room + filled, 0, (size_t)(GROUP - filled) * sizeof *room);
        }
        add_products(rooms, members, GROUP, out);
    }
}

/* NAME_encode returns 0 where a value is not finite, and then what it wrote means nothing.  Steps are a long chain of
   operations, so those of a group of blocks come first: the processor works on several chains at once.
   NAME_decode_add rounds the product, then the sum. */
#define CODEC(NAME, BLOCK, CODE_BYTES, LARGEST_LEVEL, MAY_BE_ZERO, CODES_ARE_VALID)                                 \
    enum { NAME##_group = BLOCK < GROUP ? GROUP : BLOCK };                                                          \
    int NAME##_encode(const float *values, int64_t elements, uint8_t *steps, uint8_t *codes) {                      \
        int32_t largest = 0;                                                                                        \
        float padded[NAME##_group], group_steps[NAME##_group / BLOCK];                                              \
        for (int64_t first = 0; first < elements; first += NAME##_group) {                                          \
            const float *group = values + first;                                                                    \
            int filled = elements - first < NAME##_group ? (int)(elements - first) : NAME##_group;                  \
            int blocks = (filled + BLOCK - 1) / BLOCK;                                                              \
            if (filled < blocks * BLOCK) {                                                                          \
                memset(padded, 0, sizeof padded);                                                                   \
                memcpy(padded, group, (size_t)filled * sizeof *padded);                                             \
                group = padded;                                                                                     \
            }                                                                                                       \
            for (int i = 0; i < blocks; i++) {                                                                      \
                const float *block = group + i * BLOCK;                                                             \
                int count = filled - i * BLOCK < BLOCK ? filled - i * BLOCK : BLOCK;                                \
                int32_t peak = peak_bits(block, BLOCK);                                                             \
                largest = peak > largest ? peak : largest;                                                          \
                group_steps[i] = NAME##_step(block, count, peak, codes + i * CODE_BYTES);                           \
            }                                                                                                       \
            for (int i = 0; i < blocks; i++, steps += 2, codes += CODE_BYTES) {                                     \
                put_step(steps, group_steps[i]);                                                                    \
                NAME##_codes(group + i * BLOCK, group_steps[i], codes);                                             \
            }                                                                                                       \
        }                                                                                                           \
        return largest < INFINITE;                                                                                  \
    }                                                                                                               \
    void NAME##_decode(const uint8_t *steps, const uint8_t *codes, int64_t elements, float *out) {                  \
        float values[BLOCK];                                                                                        \
        for (int64_t first = 0; first < elements; first += BLOCK, steps += 2, codes += CODE_BYTES) {                \
            int64_t filled = elements - first < BLOCK ? elements - first : BLOCK;                                   \
            NAME##_restore(get_step(steps), codes, values);                                                         \
            memcpy(out + first, values, (size_t)filled * sizeof *out);                                              \
        }                                                                                                           \
    }                                                                                                               \
    void NAME##_decode_add(const uint8_t *steps, const uint8_t *codes, int64_t elements, float weight,              \
                           float *total) {                                                                          \
        float values[BLOCK];                                                                                        \
        for (int64_t first = 0; first < elements; first += BLOCK, steps += 2, codes += CODE_BYTES) {                \
            int64_t filled = elements - first < BLOCK ? elements - first : BLOCK;                                   \
            NAME##_restore(get_step(steps), codes, values);                                                         \
            for (int i = 0; i < BLOCK; i++) values[i] *= weight;                                                    \
            for (int64_t i = 0; i < filled; i++) total[first + i] += values[i];                                     \
        }                                                                                                           \
    }                                                                                                               \
    void NAME##_dots(const uint8_t *const *steps, const uint8_t *const *codes, int64_t members, int64_t elements,   \
                     float *rooms, double *out) {                                                                   \
        for (int64_t first = 0; first < elements; first += NAME##_group) {                                          \
            int filled = elements - first < NAME##_group ? (int)(elements - first) : NAME##_group;                  \
            for (int64_t m = 0; m < members; m++) {                                                                 \
                float *room = rooms + m * NAME##_group;                                                             \
                for (int at = 0; at < filled; at += BLOCK) {                                                        \
                    int64_t block = (first + at) / BLOCK;                                                           \
                    NAME##_restore(get_step(steps[m] + 2 * block), codes[m] + block * CODE_BYTES, room + at);       \
                }                                                                                                   \
                memset(room + filled, 0, (size_t)(NAME##_group - filled) * sizeof *room);                           \
            }                                                                                                       \
            add_products(rooms, members, NAME##_group, out);                                                        \
        }                                                                                                           \
    }                                                                                                               \
    int NAME##_check(const uint8_t *steps, const uint8_t *codes, int64_t elements) {                                \
        int64_t blocks = (elements + BLOCK - 1) / BLOCK;                                                            \
        return steps_are_valid(steps, blocks, LARGEST_LEVEL, MAY_BE_ZERO) && CODES_ARE_VALID(codes, blocks);        \
    }

CODEC(int8, 256, 256, 127.0f, 0, int8_codes_are_valid)
CODEC(int4, 64, 32, 127.0f, 0, any_codes_are_valid)
CODEC(int2, 64, 16, 17.0f, 1, any_codes_are_valid)
CODEC(topk, ROW, 80, 40.0f, 1, topk_codes_are_valid)
CODEC(sparse, ROW, 422, 127.0f, 0, sparse_codes_are_valid)

/* m <- mu m + d;  theta <- theta - lr (d + mu m).  In one pass over memory, where torch needs six. */
void outer_step(float *restrict theta, float *restrict m, const float *restrict d, int64_t elements, float mu, float lr) {
    for (int64_t i = 0; i < elements; i++) {
        float moved = m[i] * mu;
        moved = moved + d[i];
        m[i] = moved;
        float update = moved * mu;
        update = update + d[i];
        update = update * lr;
        theta[i] = theta[i] - update;
    }
}
