// 8-bit floats of four bits of exponent and three of mantissa, which become float where they are read.
struct float8_e4m3 {
    uint8 bits;
    __device__ operator float() const
    {
        half number;
        number.bits = (unsigned short)((bits & 0x80) << 8 | (bits & 0x7f) << 7);
        return (bits & 0x7f) == 0x7f ? __int_as_float(0x7fffffff) : float(number) * 256.0f; // the difference of the biases
    }
};
