#include "engine/disk/state_lease.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"

#define SECOND_NS INT64_C(1000000000)

enum { NAME_BYTES = 17, REMOVE_SECONDS = 10 * STATE_LEASE_SECONDS };

static void format_lease_name(uint64_t number, char name[NAME_BYTES]) {
    snprintf(name, NAME_BYTES, "%016llx", (unsigned long long)number);
}

static int cannot(struct fault *fault, const char *what) {
    return fault_set(fault, ERR_IO, "state-dir", "%s: %s", what, strerror(errno));
}

static bool make_file(struct state_lease *lease) {
    char name[NAME_BYTES];
    format_lease_name(lease->number, name);
    if (lease->file >= 0) close(lease->file);
    lease->file =
        openat(lease->folder, name, O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC, (mode_t)0600);
    return lease->file >= 0;
}

/* The time stamp of a lease may be ahead of the present, too, where clocks differ. */
static bool is_within(const struct state_lease *lease, const struct stat *st, int64_t seconds) {
    int64_t age = lease->now_unix - st->st_mtime;
    return age <= seconds && age >= -seconds;
}

/* Sets the time stamp and reads it back: it is the file system's present time. */
static bool stamp(struct state_lease *lease) {
    struct stat st;
    if (futimens(lease->file, NULL) != 0 || fstat(lease->file, &st) != 0) return false;
    if (st.st_nlink == 0) return false; /* somebody removed it */
    lease->now_unix = st.st_mtime;
    lease->stamped_ns = clock_ns();
    return true;
}

static void examine_lease(struct state_lease *lease, const char *name) {
    struct stat st;
    char again[NAME_BYTES];
    const uint64_t number = strtoull(name, NULL, 16);
    format_lease_name(number, again);
    if (strcmp(name, again) != 0 || number == lease->number) return;
    if (fstatat(lease->folder, name, &st, AT_SYMLINK_NOFOLLOW) != 0) return;
    if (!is_within(lease, &st, REMOVE_SECONDS))
        unlinkat(lease->folder, name, 0);
    else
        lease->count += is_within(lease, &st, STATE_LEASE_SECONDS);
}

static bool examine_other_leases(struct state_lease *lease) {
    int fd = openat(lease->folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *list = fd >= 0 ? fdopendir(fd) : NULL;
    const struct dirent *entry;
    if (!list) {
        if (fd >= 0) close(fd);
        return false;
    }
    lease->count = 0;
    while ((entry = readdir(list)) != NULL) examine_lease(lease, entry->d_name);
    closedir(list);
    return true;
}

int state_lease_open(struct state_lease *lease, int dir, struct fault *fault) {
    const size_t size = sizeof lease->number;
    *lease = (struct state_lease){.folder = -1, .file = -1};
    while (lease->number == 0) CHECK(getrandom(&lease->number, size, 0) == (ssize_t)size);
    if (mkdirat(dir, "daemons", 0700) != 0 && errno != EEXIST)
        return cannot(fault, "its folder of leases cannot be made");
    lease->folder = openat(dir, "daemons", O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (lease->folder < 0) return cannot(fault, "its folder of leases cannot be opened");
    if (!make_file(lease) || !stamp(lease) || !examine_other_leases(lease))
        return cannot(fault, "its lease cannot be made");
    return 0;
}

void state_lease_close(struct state_lease *lease) {
    char name[NAME_BYTES];
    format_lease_name(lease->number, name);
    if (lease->file >= 0) {
        unlinkat(lease->folder, name, 0);
        close(lease->file);
    }
    if (lease->folder >= 0) close(lease->folder);
    *lease = (struct state_lease){.folder = -1, .file = -1};
}

void state_lease_renew(struct state_lease *lease) {
    bool renewed = stamp(lease) || (make_file(lease) && stamp(lease));
    if (!renewed || !examine_other_leases(lease))
        log_warn("the lease of the state directory cannot be renewed: %s", strerror(errno));
}

void state_lease_keep(struct state_lease *lease) {
    int64_t now_ns = clock_ns();
    if (lease->file < 0 || now_ns - lease->stamped_ns < STATE_RENEW_SECONDS * SECOND_NS) return;
    lease->stamped_ns = now_ns;
    (void)futimens(lease->file, NULL); /* the next renewal tells of a failure */
}

/* Asks the file system for the lease itself: a daemon that began after the last look at all leases
 * made its own before it wrote anything. */
bool state_lease_lives(const struct state_lease *lease, uint64_t number) {
    char name[NAME_BYTES];
    struct stat st;
    format_lease_name(number, name);
    if (number == lease->number) return true;
    return fstatat(lease->folder, name, &st, AT_SYMLINK_NOFOLLOW) == 0 &&
           is_within(lease, &st, STATE_LEASE_SECONDS);
}
