package cpu

// unknownMemory replaces the size of the machine's memory where the system does not
// report it: half of the address space of Go's allocator, 2^48 bytes on 64 bit machines
// and 2^32 on others.
const unknownMemory = 1 << (31 + 16*(^uint(0)>>63))
