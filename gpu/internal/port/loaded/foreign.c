//go:build cgo && !gogpu && ((linux && amd64 && !android) || (darwin && !ios) || (windows && amd64))

#define _GNU_SOURCE // for RTLD_DEEPBIND
#include <stdio.h>
#include "foreign.h"

#ifdef _WIN32
#include <windows.h>
uintptr_t foreign_open(char const *name, char *message, size_t size) {
	HMODULE h = LoadLibraryA(name);
	if (!h) snprintf(message, size, "LoadLibrary failed with error %lu", GetLastError());
	return (uintptr_t)h;
}
uintptr_t foreign_symbol(uintptr_t library, char const *name) { return (uintptr_t)GetProcAddress((HMODULE)library, name); }
#else
#include <dlfcn.h>
#ifndef RTLD_DEEPBIND
#define RTLD_DEEPBIND 0
#endif
// The program exports the functions of wgpu-native, which have the same names: RTLD_DEEPBIND makes
// the library use its own.
uintptr_t foreign_open(char const *name, char *message, size_t size) {
	void *h = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
	if (!h) snprintf(message, size, "%s", dlerror());
	return (uintptr_t)h;
}
uintptr_t foreign_symbol(uintptr_t library, char const *name) { return (uintptr_t)dlsym((void *)library, name); }
#endif

typedef uintptr_t w;
uintptr_t foreign_call(w f, w a, w b, w c, w d, w e, w g) { return ((w (*)(w, w, w, w, w, w))f)(a, b, c, d, e, g); }

void foreign_call_info(w f, foreign_info info, int n, w a, w b, w c, w d) {
	switch (n) {
	case 1: ((w (*)(w, foreign_info))f)(a, info); break;
	case 2: ((w (*)(w, w, foreign_info))f)(a, b, info); break;
	case 3: ((w (*)(w, w, w, foreign_info))f)(a, b, c, info); break;
	case 4: ((w (*)(w, w, w, w, foreign_info))f)(a, b, c, d, info); break;
	}
}

// The callbacks of webgpu.h get their message as a structure.
typedef struct { char *data; size_t length; } view;
extern void foreignAnswer(uint32_t status, w object, char *data, size_t length, w user1, w user2);
static void on_object(uint32_t status, w object, view m, w u1, w u2) { foreignAnswer(status, object, m.data, m.length, u1, u2); }
static void on_status(uint32_t status, view m, w u1, w u2) { foreignAnswer(status, 0, m.data, m.length, u1, u2); }
static void on_device(w device, uint32_t type, view m, w u1, w u2) { foreignAnswer(type, 0, m.data, m.length, u1, u2); }

foreign_functions foreign_callbacks(void) {
	return (foreign_functions){ (w)on_object, (w)on_status, (w)on_device };
}
