package loaded_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/gpu/internal/port/libraries"
	"github.com/seed90331342/attn/gpu/internal/port/loaded"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// Definitions of functions in C, by which libraries differ. Other functions return 0.
const (
	version  = "unsigned wgpuGetVersion(void) { return 0x00130401; }"
	instance = "void *wgpuCreateInstance(void *d) { return (void *)64; }"
	adapter  = `
typedef struct { void *next; int mode; void (*f)(int, void *, view, void *, void *); void *user[2]; } info;
unsigned long wgpuInstanceRequestAdapter(void *i, void *options, info c) { c.f(1, (void *)64, (view){0, 0}, c.user[0], c.user[1]); return 0; }`
	noAdapter = `
typedef struct { void *next; int mode; void (*f)(int, void *, view, void *, void *); void *user[2]; } info;
unsigned long wgpuInstanceRequestAdapter(void *i, void *options, info c) { c.f(3, 0, (view){"nothing", -1}, c.user[0], c.user[1]); return 0; }`
	// The kind of an adapter is behind four strings, and l[20] and l[21] are alignments.
	kind      = "\nint wgpuAdapterGetInfo(void *a, int *i) { i[18] = 6; i[19] = 3; return 1; }"
	oddKind   = "\nint wgpuAdapterGetInfo(void *a, int *i) { i[18] = 6; i[19] = 77; return 1; }"
	limits    = "\nint wgpuAdapterGetLimits(void *a, int *l) { for (int i = 2; i < 40; i++) l[i] = 1 << 30; l[20] = l[21] = 64; return 1; }"
	lowLimits = "\nint wgpuAdapterGetLimits(void *a, int *l) { l[20] = l[21] = 64; return 1; }"
	oddLimits = "\nint wgpuAdapterGetLimits(void *a, int *l) { for (int i = 2; i < 40; i++) l[i] = 1 << 30; l[20] = 64; l[21] = 48; return 1; }"
)

// A library that cannot be used is an error that says why.
func TestLibrariesThatDoNotFit(t *testing.T) {
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		t.Skipf("needs gcc to build libraries: %v", err)
	}
	dir := t.TempDir()
	text := filepath.Join(dir, "text.so")
	must.Do(t, os.WriteFile(text, []byte("no library"), 0o600))
	build := func(name, code string, symbols ...string) string {
		source := []string{"#include <string.h>", "typedef struct { char *data; long length; } view;", code}
		for _, s := range symbols {
			if !strings.Contains(code, " "+s+"(") && !strings.Contains(code, "*"+s+"(") {
				source = append(source, fmt.Sprintf("void *%s(void) { return 0; }", s))
			}
		}
		c, so := filepath.Join(dir, name+".c"), filepath.Join(dir, name+".so")
		must.Do(t, os.WriteFile(c, []byte(strings.Join(source, "\n")), 0o600))
		if out, err := exec.CommandContext(t.Context(), gcc, "-w", "-shared", "-fPIC", "-o", so, c).CombinedOutput(); err != nil {
			t.Fatalf("gcc: %v\n%s", err, out)
		}
		return so
	}
	all := loaded.Functions()
	without := func(s string) []string {
		return slices.DeleteFunc(slices.Clone(all), func(f string) bool { return f == s })
	}
	for _, c := range []struct{ library, want string }{
		{filepath.Join(dir, "missing.so"), "missing.so"},
		{dir, dir},
		{text, "text.so"},
		{"libm.so.6", "it is not a webgpu.h library: it lacks the function wgpu"},
		{build("old2023", version, "wgpuCreateInstance"), "old2023.so (wgpu-native 0.19.4.1) has the webgpu.h of 2023 or before, take one of July 2025 or later"},
		{build("old2024", "", "wgpuCreateInstance", "wgpuAdapterInfoFreeMembers"), "has the webgpu.h of 2024"},
		{build("old2025", "", "wgpuCreateInstance", "wgpuAdapterInfoFreeMembers", "wgpuSupportedFeaturesFreeMembers"), "has the webgpu.h of early 2025"},
		{build("part", "", without("wgpuQueueSubmit")...), "lacks the function wgpuQueueSubmit, take a complete build"},
		{build("noinstance", "", all...), "wgpuCreateInstance failed"},
		{build("noadapter", instance+noAdapter, all...), "it finds no Vulkan, Metal or DX12 driver"},
		{build("lowlimits", instance+adapter+kind+lowLimits, all...), "describes its adapters in an unknown way"},
		{build("oddlimits", instance+adapter+kind+oddLimits, all...), "describes its adapters in an unknown way"},
		{build("oddkind", instance+adapter+oddKind+limits, all...), "describes its adapters in an unknown way"},
	} {
		list, err := libraries.Adapters(c.library)
		must.Fail(t, fmt.Sprintf("%s: %d adapters", filepath.Base(c.library), len(list)), err, port.ErrNoAdapter, c.want)
	}
	t.Setenv(libraries.Environment, text)
	if _, err := libraries.Adapters(""); err == nil || !strings.Contains(err.Error(), "text.so") {
		t.Errorf("named by the environment: %v", err)
	}
	list, err := libraries.Adapters(libraries.None)
	if err != nil && strings.Contains(err.Error(), "WebGPU library") {
		t.Errorf("off: %v", err)
	}
	for _, a := range list {
		a.Release()
	}
}
