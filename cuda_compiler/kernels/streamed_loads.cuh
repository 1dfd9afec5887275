// Loads of what is read once: they take no place in the level-1 cache, are not moved by the compiler, and change
// nothing where `valid` is false. Words are taken apart only where they are used, so that nothing waits for a load
// before that.
template <int BYTES>
__device__ __forceinline__ void load_bits(uint* word, const uint8* source, bool valid)
{
    if (BYTES == 16) {
        asm volatile("{\n\t.reg .pred valid;\n\tsetp.ne.s32 valid, %5, 0;\n\t"
                     "@valid ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
                     : "+r"(word[0]), "+r"(word[1]), "+r"(word[2]), "+r"(word[3])
                     : "l"(source), "r"(int(valid)));
    } else if (BYTES == 8) {
        asm volatile("{\n\t.reg .pred valid;\n\tsetp.ne.s32 valid, %3, 0;\n\t"
                     "@valid ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];\n\t}"
                     : "+r"(word[0]), "+r"(word[1])
                     : "l"(source), "r"(int(valid)));
    } else if (BYTES == 4) {
        asm volatile("{\n\t.reg .pred valid;\n\tsetp.ne.s32 valid, %2, 0;\n\t"
                     "@valid ld.global.L1::no_allocate.u32 %0, [%1];\n\t}"
                     : "+r"(word[0])
                     : "l"(source), "r"(int(valid)));
    } else if (valid) {
        word[0] = BYTES == 2 ? *reinterpret_cast<const unsigned short*>(source) : *source;
    }
}

// The number whose bits are the lowest ones.
__device__ __forceinline__ float element_of(uint bits, float) { return __uint_as_float(bits); }
__device__ __forceinline__ float element_of(uint bits, half element)
{
    element.bits = (unsigned short)bits;
    return float(element);
}
__device__ __forceinline__ float element_of(uint bits, bfloat) { return __uint_as_float(bits << 16); }
