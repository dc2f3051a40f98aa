package cpu

// unknownMemory stands for the machine's memory where the system does not say:
// half of what Go's allocator can address on 64 bit machines (2^48), or on 32
// bit ones.
const unknownMemory = 1 << (31 + 16*(^uint(0)>>63))
