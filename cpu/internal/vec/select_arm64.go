package vec

// assembly lists the tables of assembly kernels that this machine runs. Every processor
// that Go supports has NEON with FMAs and the conversions of binary16.
var assembly = []*Kernels{&kernelsNEON}
