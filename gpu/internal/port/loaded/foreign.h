#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

// Calls of libraries that are opened at run time.

typedef struct { uintptr_t next; uint32_t mode; uintptr_t callback, user[2]; } foreign_info;
typedef struct { uintptr_t object, status, device; } foreign_functions;

uintptr_t foreign_open(char const *name, char *message, size_t size);
uintptr_t foreign_symbol(uintptr_t library, char const *name);
uintptr_t foreign_call(uintptr_t f, uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d, uintptr_t e, uintptr_t g);
void foreign_call_info(uintptr_t f, foreign_info info, int n, uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d);
foreign_functions foreign_callbacks(void);
