/* What a freeze and a load do with a model's values in host memory, in one pass and without memory of its own.

   Called by: fused.py, which has it compiled, and uses it only where it gives the bits of its torch path.
   Must not know: Python, tensors, threads, why anything is done.

   Everything is done value by value, and each operation below rounds as torch's vector code does: once, where it says
   `fused`; the flags that it is compiled with forbid any other fusing.  Where two operands are the same memory, each
   value is read before it is written: a block is worked out in a buffer first, which also lets a compiler use vectors. */

#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define BLOCK 512
#define LEARNED 1
#define RESTORED 2

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float wide_fp32(float value) { return value; }
static inline float wide_bf16(uint16_t value) { return float_of((uint32_t)value << 16); }
static inline float narrow_fp32(float value) { return value; }

/* To the nearest, ties to even; what is no number becomes one certain of those. */
static inline uint16_t narrow_bf16(float value) {
    uint32_t bits = bits_of(value);
    uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
}

static inline float fused(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

/* Past the caches, where nobody reads it again soon: memory is then not read in order to be overwritten. */
static inline void put(void *to, const void *from, size_t bytes) {
#if defined(__SSE2__)
    if (((uintptr_t)to | bytes) % 16 == 0) {
        for (size_t at = 0; at < bytes; at += 16)
            _mm_stream_si128((__m128i *)((char *)to + at), _mm_loadu_si128((const __m128i *)((const char *)from + at)));
        return;
    }
#endif
    memcpy(to, from, bytes);
}

/* What was put is there for other threads and processes, before they are told so. */
static inline void settle(void) {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

/* Equal values have learned nothing: two infinities, too, as in a mask. */
static inline float learned(float then, float now) {
    float delta = then - now;
    return then == now && delta != delta ? 0.0f : delta;
}

#define KERNELS(name, type)                                                                                       \
                                                                                                                  \
    /* out = (then - now) + carry */                                                                              \
    void owed_##name(const type *now, const type *then, const float *carry, float *out, int64_t elements) {       \
        float room[BLOCK];                                                                                        \
        for (int64_t at = 0; at < elements; at += BLOCK) {                                                        \
            int count = elements - at < BLOCK ? (int)(elements - at) : BLOCK;                                     \
            for (int i = 0; i < count; i++) room[i] = learned(wide_##name(then[at + i]), wide_##name(now[at + i])); \
            if (carry)                                                                                            \
                for (int i = 0; i < count; i++) room[i] += carry[at + i];                                         \
            put(out + at, room, (size_t)count * sizeof *out);                                                  \
        }                                                                                                         \
        settle();                                                                                                 \
    }                                                                                                             \
                                                                                                                  \
    /* now = loaded = anchor - owed + momentum * rate */                                                          \
    void ahead_##name(type *now, type *loaded, const float *anchor, const float *momentum, const float *owed,     \
                      float rate, int64_t elements) {                                                             \
        type room[BLOCK];                                                                                         \
        for (int64_t at = 0; at < elements; at += BLOCK) {                                                        \
            int count = elements - at < BLOCK ? (int)(elements - at) : BLOCK;                                     \
            if (momentum)                                                                                         \
                for (int i = 0; i < count; i++)                                                                   \
                    room[i] = narrow_##name(fused(momentum[at + i], rate, anchor[at + i] - owed[at + i]));        \
            else                                                                                                  \
                for (int i = 0; i < count; i++) room[i] = narrow_##name(anchor[at + i] - owed[at + i]);           \
            put(now + at, room, (size_t)count * sizeof *now);                                                  \
            put(loaded + at, room, (size_t)count * sizeof *loaded);                                            \
        }                                                                                                         \
        settle();                                                                                                 \
    }                                                                                                             \
                                                                                                                  \
    /* LEARNED: kept = (loaded - now) + old - slot.  RESTORED: kept = slot.  Then now = loaded = anchor - kept,   \
       and of that `mix` is where it stood, if it is not 0. */                                                    \
    void taken_##name(type *now, type *loaded, const float *anchor, const float *old, const float *slot,          \
                      float *kept, int what, float mix, int64_t elements) {                                       \
        float rest[BLOCK], value[BLOCK];                                                                          \
        type room[BLOCK];                                                                                         \
        for (int64_t at = 0; at < elements; at += BLOCK) {                                                        \
            int count = elements - at < BLOCK ? (int)(elements - at) : BLOCK;                                     \
            if (what == LEARNED) {                                                                                \
                for (int i = 0; i < count; i++)                                                                   \
                    rest[i] = learned(wide_##name(loaded[at + i]), wide_##name(now[at + i]));                     \
                if (old)                                                                                          \
                    for (int i = 0; i < count; i++) rest[i] += old[at + i];                                       \
                if (slot)                                                                                         \
                    for (int i = 0; i < count; i++) rest[i] -= slot[at + i];                                      \
            } else if (what == RESTORED) {                                                                        \
                memcpy(rest, slot + at, (size_t)count * sizeof *rest);                                            \
            }                                                                                                     \
            if (what)                                                                                             \
                for (int i = 0; i < count; i++) value[i] = anchor[at + i] - rest[i];                              \
            else                                                                                                  \
                memcpy(value, anchor + at, (size_t)count * sizeof *value);                                        \
            if (mix != 0.0f) {                                                                                    \
                if (mix < 0.5f)                                                                                   \
                    for (int i = 0; i < count; i++)                                                               \
                        value[i] = fused(mix, wide_##name(now[at + i]) - value[i], value[i]);                     \
                else                                                                                              \
                    for (int i = 0; i < count; i++) {                                                             \
                        float stood = wide_##name(now[at + i]);                                                   \
                        value[i] = fused(mix - 1.0f, stood - value[i], stood);                                    \
                    }                                                                                             \
                for (int i = 0; i < count; i++) rest[i] = anchor[at + i] - value[i];                              \
            }                                                                                                     \
            for (int i = 0; i < count; i++) room[i] = narrow_##name(value[i]);                                    \
            put(now + at, room, (size_t)count * sizeof *now);                                                  \
            put(loaded + at, room, (size_t)count * sizeof *loaded);                                            \
            if (kept) put(kept + at, rest, (size_t)count * sizeof *kept);                                      \
        }                                                                                                         \
        settle();                                                                                                 \
    }

KERNELS(fp32, float)
KERNELS(bf16, uint16_t)
