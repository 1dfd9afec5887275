// The vector of a product as integers: a number of 16 bits, in two bytes, for each element, times a power of two for
// each unit.
constexpr int DIGIT_ROW = COMMON + 64; // neighbours begin in other banks

// In shared memory: the upper and the lower bytes; of each unit the power of two, and the sum, negative.
struct Vector {
    signed char* digits;
    float2* units;

    // By all threads, which have 8 elements at a time: `octet` computes those from a place on, and returns what they
    // add to a sum of all. Returns this thread's part of it.
    template <typename Octet>
    __device__ __forceinline__ float make(Octet octet) const
    {
        constexpr int OCTETS = COMMON / 8, ROUNDS = (OCTETS + THREADS - 1) / THREADS;
        constexpr int AT_ONCE = ROUNDS < 4 ? ROUNDS : 4; // so many loads wait for memory together
        float part = 0.0f;
        #pragma unroll 1
        for (int round = 0; round < ROUNDS; round += AT_ONCE) {
            int first = int(threadIdx.x) + round * THREADS;
            if (first / 32 * 32 < OCTETS) {
                float value[AT_ONCE][8];
                #pragma unroll
                for (int each = 0; each < AT_ONCE; ++each) {
                    int place = first + each * THREADS;
                    float added = octet((place < OCTETS ? place : 0) * 8, value[each]);
                    part += place < OCTETS ? added : 0.0f;
                }
                #pragma unroll
                for (int each = 0; each < AT_ONCE; ++each) {
                    make_octet(value[each], first + each * THREADS);
                }
            }
        }
        return part;
    }

private:
    // Numbers of a unit, whose octets neighbouring lanes have, get 14 bits and a sign where they are the largest.
    __device__ __forceinline__ void make_octet(const float (&given)[8], int octet) const
    {
        constexpr int SHARERS = UNIT / 8, LEAST = SPLIT ? 18 : 14;
        float largest = 0.0f;
        #pragma unroll
        for (int u = 0; u < 8; ++u) {
            largest = greater(largest, fabsf(given[u]));
        }
        uint exponent = __float_as_uint(warp_max<SHARERS>(largest)) >> 23;
        bool is_number = exponent < 255;
        exponent = exponent < LEAST ? LEAST : exponent;
        float factor = __uint_as_float((267u - exponent) << 23); // times this, the largest is below 2^14
        constexpr float WHOLE = WHOLE_FLOATS + 128.0f; // so a number is its upper byte times 256 and the lower - 128
        uint bits[8];
        int sum = 0; // of what codes are multiplied by, in sixteenths where they are SPLIT
        #pragma unroll
        for (int u = 7; u >= 0; --u) {
            float number = given[u] * factor;
            if (SPLIT && u % 2 == 0) {
                number -= (__uint_as_float(bits[u + 1]) - WHOLE) * 0.0625f;
            }
            bits[u] = __float_as_uint(number + WHOLE);
            int whole = int(bits[u] - __float_as_uint(WHOLE));
            sum += SPLIT ? whole * (u % 2 ? 17 : 16) : whole;
        }
        float total = ZEROS || ZERO != 0 ? warp_sum<SHARERS>(float(sum)) : 0.0f;
        if (octet < COMMON / 8) {
            signed char* unit = digits + octet / SHARERS * UNIT;
            store_bytes<1>(unit, octet % SHARERS, bits, 0);
            store_bytes<0>(unit + DIGIT_ROW, octet % SHARERS, bits, 0x80808080u);
            if (octet % SHARERS == 0) {
                float scale = __uint_as_float(is_number ? (exponent - (LEAST - 1u)) << 23 : 0x7fc00000u);
                units[octet / SHARERS] = make_float2(scale, -scale * total);
            }
        }
    }

    // Each lane reads its part of a unit's products from one place: of each product two words, with codes of four bits
    // those of the lower halves of bytes first. Of each number byte BYTE is taken, and bits of it are turned.
    template <int BYTE>
    __device__ __forceinline__ static void store_bytes(signed char* unit, int octet, const uint (&from)[8], uint turned)
    {
        constexpr int APART = BITS == 4 ? 2 : 1, SECOND = BITS == 4 ? 1 : 4;
        uint word[2];
        #pragma unroll
        for (int side = 0; side < 2; ++side) {
            int first = side * SECOND;
            uint low = __byte_perm(from[first], from[first + APART], 0x0040 + BYTE * 0x11);
            uint high = __byte_perm(from[first + 2 * APART], from[first + 3 * APART], 0x0040 + BYTE * 0x11);
            word[side] = __byte_perm(low, high, 0x5410) ^ turned;
        }
        if (BITS == 4) {
            Pack<uint, 2> both;
            both[0] = word[0], both[1] = word[1];
            store_pack(reinterpret_cast<uint*>(unit + octet % 4 * (UNIT / 4) + octet / 4 * 8), both);
        } else {
            uint* target = reinterpret_cast<uint*>(unit + octet % 2 * 2 * (UNIT / 4) + octet / 2 * 4);
            target[0] = word[0];
            target[UNIT / 16] = word[1];
        }
    }
};
