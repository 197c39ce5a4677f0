/* Leases: how the daemons that share a state directory know of each other, without locks, which
 * network file systems do not always have.
 *
 * - A daemon's lease is the file daemons/<16 hex digits>; the digits are its random number. The
 *   daemon sets the file's time stamp again and again. A lease whose time stamp is more than
 *   STATE_LEASE_SECONDS old, or so far in the future, has expired: its daemon has ended, or hangs.
 * - A conversation's lease is the time stamp of its own file. The daemon that reads the file, to
 *   continue the conversation, sets it.
 *
 * The file system sets the time stamps ("now"), not the daemons, and the present time is read from
 * the file system, too: it is the time stamp of the lease that was just renewed. So the clocks of
 * the machines do not matter where a server has the clock, as with NFS. Where each client sets the
 * times of its files, clocks may differ by the time between a lease's renewal and its expiry,
 * nearly a minute. A lease that is misjudged costs no answer: see engine/disk/store.h.
 *
 * One thread at a time may call. */
#ifndef KEEPD_ENGINE_DISK_STATE_LEASE_H
#define KEEPD_ENGINE_DISK_STATE_LEASE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"

#define STATE_LEASE_SECONDS 60
#define STATE_RENEW_SECONDS 2

struct state_lease {
    uint64_t number;    /* this daemon's; 0: closed */
    int folder, file;   /* descriptors of daemons/ and of the lease; -1: none */
    int64_t now_unix;   /* the file system's time when the lease was renewed last */
    int count;          /* other leases that have not expired, when they were looked at last */
    int64_t stamped_ns; /* clock_ns when the time stamp was set last */
};

/* Makes the lease, and looks at the others, in the directory with this descriptor. ERR_IO:
 * fault->field is "state-dir". The caller closes the lease whatever this returns. */
int state_lease_open(struct state_lease *lease, int dir, struct fault *fault);
/* Removes the lease. */
void state_lease_close(struct state_lease *lease);

/* Renews the lease, also where somebody removed it, and looks at the others. Leases that expired
 * long ago are removed. A failure is logged, and leaves what was known. */
void state_lease_renew(struct state_lease *lease);

/* Sets the lease's time stamp if that is due: for work that may take longer than a lease lasts.
 * Looks at nothing, and leaves now_unix. */
void state_lease_keep(struct state_lease *lease);

/* Is this the number of a daemon that runs, this one included? Looks at its lease. */
bool state_lease_lives(const struct state_lease *lease, uint64_t number);

#endif
