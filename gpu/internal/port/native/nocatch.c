#if !(defined __linux__ && defined __x86_64__)
#include "native.h"

_Thread_local port_state *port_compiling;

// Here a panic of the library ends the process.
int port_try(void (*f)(void *), void *arg) {
	f(arg);
	return 0;
}
#endif
