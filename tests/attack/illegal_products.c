// LD_PRELOAD: a processor on which the first matrix product that oneDNN compiles raises SIGILL, unless
// ONEDNN_MAX_CPU_ISA is one of SURVIVES (or is set to anything, where that is empty).
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static int survives(void) {
    const char *limit = getenv("ONEDNN_MAX_CPU_ISA"), *survived = getenv("SURVIVES");
    return limit && (!survived || !strcmp(limit, survived));
}

int mprotect(void* from, size_t size, int how) {  // how oneDNN makes its code executable
    Dl_info caller;
    if (how & PROT_EXEC && dladdr(__builtin_return_address(0), &caller) && strstr(caller.dli_fname, "libtorch_cpu"))
        if (!survives()) __builtin_trap();
    return syscall(SYS_mprotect, from, size, how);
}
