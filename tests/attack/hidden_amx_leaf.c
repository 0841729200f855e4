// LD_PRELOAD: a virtual machine whose hypervisor hides CPUID leaf 0x1D (the highest is 0x1C) while the AMX flags are
// set. CPUID is made to fault in this process, and answered here. Needs an Intel processor with AMX.
#define _GNU_SOURCE
#include <asm/prctl.h>
#include <cpuid.h>
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>
#ifndef ARCH_SET_CPUID
#define ARCH_SET_CPUID 0x1012
#endif

typedef int (*Sigaction)(int, const struct sigaction*, struct sigaction*);
static struct sigaction others;  // for faults that are not ours

static Sigaction real_sigaction(void) { return (Sigaction)dlsym(RTLD_NEXT, "sigaction"); }

int sigaction(int number, const struct sigaction* action, struct sigaction* old) {
    if (number != SIGSEGV) return real_sigaction()(number, action, old);
    if (old) *old = others;
    if (action) others = *action;
    return 0;
}

sighandler_t signal(int number, sighandler_t handler) {
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART}, old;
    return sigaction(number, &action, &old) ? SIG_ERR : old.sa_handler;
}

static void on_fault(int number, siginfo_t* info, void* context) {
    greg_t* at = ((ucontext_t*)context)->uc_mcontext.gregs;
    const unsigned char* code = (const unsigned char*)at[REG_RIP];
    if (code[0] != 0x0f || code[1] != 0xa2) {  // not CPUID
        real_sigaction()(number, &others, 0);
        return;
    }
    unsigned leaf = at[REG_RAX], a, b, c, d;
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 1);
    __cpuid_count(leaf, (unsigned)at[REG_RCX], a, b, c, d);
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0);
    if (leaf == 0 && a > 0x1c) a = 0x1c;
    if (leaf > 0x1c && leaf < 0x40000000) a = b = c = d = 0;
    at[REG_RAX] = a, at[REG_RBX] = b, at[REG_RCX] = c, at[REG_RDX] = d;
    at[REG_RIP] += 2;
}

__attribute__((constructor)) static void hide(void) {
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK};
    real_sigaction()(SIGSEGV, &action, &others);
    if (syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0)) perror("this processor cannot make CPUID fault"), exit(77);
}
