// Packs of bytes as numbers, and numbers as packs of bytes. Conversion instructions have an eighth of the throughput of
// those used here.

// Two float16 less two others.
__device__ __forceinline__ uint pair_difference(uint a, uint b)
{
    uint result;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

// The number of a byte of a pack of at least four, less a constant that is such a number. Float16 from 1024 to 2047 are
// whole numbers: 1024 with a byte in its lower bits is 1024 plus that byte. Two of them are made at a time.
template <typename T, int COUNT>
__device__ __forceinline__ float number_of_byte(const Pack<T, COUNT>& pack, int u, int zero)
{
    constexpr bool SIGNED = T(-1) < T(0);
    uint word = SIGNED ? pack.words[u / 4] ^ 0x80808080u : pack.words[u / 4];
    uint pair = __byte_perm(word, 0x64646464u, u % 4 < 2 ? 0x4140 : 0x4342);
    uint taken = 0x6400u + (SIGNED ? 128 : 0) + zero;
    return number_in_pair<half>(pair_difference(pair, taken * 0x10001u), u % 2);
}

// The low bytes of integers, four of them at a time.
template <typename T, int COUNT>
__device__ __forceinline__ Pack<T, COUNT> pack_of_bytes(const int (&values)[COUNT])
{
    Pack<T, COUNT> pack;
    #pragma unroll
    for (int u = 0; u < COUNT; u += 4) {
        uint low = __byte_perm(values[u], values[u + 1], 0x0040);
        uint high = __byte_perm(values[u + 2], values[u + 3], 0x0040);
        pack.words[u / 4] = __byte_perm(low, high, 0x5410);
    }
    return pack;
}
