/* For tests of the daemon under short memory: each SIGUSR1 makes one allocation that a client or a
 * file can influence fail (base/mem.h), the first after the signal, then the second, and so on;
 * SIGUSR2 takes a failure back that has not happened yet. Linked into keepd-fake. */
#include <signal.h>
#include <stdlib.h>

#include "base/mem.h"

static void on_signal(int number) {
    static long next;
    mem_fail_after(number == SIGUSR1 ? next++ : -1); /* stores an atomic number */
}

__attribute__((constructor)) static void listen_for_signals(void) {
    if (!getenv("KEEPD_TEST_MEMORY")) return;
    signal(SIGUSR1, on_signal);
    signal(SIGUSR2, on_signal);
}
