#include <unwind.h>
#include "native.h"

_Thread_local port_state *port_compiling;

// wgpu-native panics when a submission or a poll finds the device lost. The panic unwinds the
// stack, finds no handler, and the process aborts. port_try is a frame with a handler, which
// C has no word for: an exception that arrives there continues at port_caught.
__asm__(
	".text\n"
	".globl port_try\n"
	".hidden port_try, port_caught\n"
	".type port_try, @function\n"
	"port_try:\n"
	"	.cfi_startproc\n"
	"	.cfi_personality 0x9b, port_personality_ref\n" // indirect, relative, 4 bytes
	"	pushq %rbp\n"
	"	.cfi_def_cfa_offset 16\n"
	"	.cfi_offset %rbp, -16\n"
	"	movq %rsp, %rbp\n"
	"	.cfi_def_cfa_register %rbp\n"
	"	movq %rdi, %rax\n"
	"	movq %rsi, %rdi\n"
	"	call *%rax\n"
	"	xorl %eax, %eax\n"
	"	popq %rbp\n"
	"	.cfi_remember_state\n"
	"	.cfi_def_cfa %rsp, 8\n"
	"	ret\n"
	"port_caught:\n"
	"	.cfi_restore_state\n"
	"	movq %rax, %rdi\n"
	"	call port_forget\n"
	"	movl $1, %eax\n"
	"	popq %rbp\n"
	"	.cfi_def_cfa %rsp, 8\n"
	"	ret\n"
	"	.cfi_endproc\n"
	".size port_try, .-port_try\n"
	".section .data.rel.local, \"aw\"\n"
	".align 8\n"
	"port_personality_ref:\n"
	"	.quad port_personality\n"
	".text\n");

extern char port_caught[] __attribute__((visibility("hidden")));

// std::panicking::try::cleanup of the Rust release that v0.17.1 of the binding contains: it
// ends the panic of this thread.
extern void _ZN3std9panicking3try7cleanup17hc98f0df44d621f22E(void *exception) __attribute__((weak));

__attribute__((visibility("hidden"), used)) void port_forget(void *exception) {
	if (_ZN3std9panicking3try7cleanup17hc98f0df44d621f22E) _ZN3std9panicking3try7cleanup17hc98f0df44d621f22E(exception);
}

// port_personality is called by the unwinder: first to find the handler, then to go there.
__attribute__((visibility("hidden"), used)) _Unwind_Reason_Code port_personality(int version, _Unwind_Action actions,
	_Unwind_Exception_Class class, struct _Unwind_Exception *exception, struct _Unwind_Context *context) {
	if (actions & _UA_SEARCH_PHASE) return _URC_HANDLER_FOUND;
	if (!(actions & _UA_HANDLER_FRAME)) return _URC_CONTINUE_UNWIND;
	_Unwind_SetGR(context, __builtin_eh_return_data_regno(0), (_Unwind_Word)exception);
	_Unwind_SetIP(context, (_Unwind_Ptr)port_caught);
	return _URC_INSTALL_CONTEXT;
}
