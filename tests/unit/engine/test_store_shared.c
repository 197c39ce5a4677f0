/* Tests several daemons that use one state directory: each is a store that was opened for itself.
 */
#include <criterion/criterion.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "engine/disk/state_dir.h"
#include "tests/unit/engine/store_bed.h"

TestSuite(store_shared, .init = make_dir, .fini = remove_dir);

static const char *const name_1 = "00000000000001f5.state"; /* 501 */

/* Makes the index show what the others did until now. */
static void look(struct store *store) {
    cr_assert(store_fresh(store, clock_ns()));
}

static uint64_t find_whole(struct store *store, int seed) {
    look(store);
    return find(store, seed, TOKENS, "space", 32, 0);
}

/* Sets the time stamp of a file, in seconds from now. */
static void set_age(const char *name, int seconds) {
    const struct timespec times[2] = {{.tv_sec = time(NULL) + seconds},
                                      {.tv_sec = time(NULL) + seconds}};
    cr_assert_eq(utimensat(AT_FDCWD, path_of(name), times, 0), 0);
}

static void touch(const char *name) {
    close(open(path_of(name), O_CREAT | O_WRONLY, 0600));
}

static bool is_there(const char *name) {
    return access(path_of(name), F_OK) == 0;
}

static int64_t bytes_there(void) {
    DIR *list = opendir(dir);
    const struct dirent *entry;
    int64_t bytes = 0;
    struct stat st;
    while ((entry = readdir(list)) != NULL)
        if (strstr(entry->d_name, ".state") && stat(path_of(entry->d_name), &st) == 0)
            bytes += st.st_size;
    closedir(list);
    return bytes;
}

/* Conversation 1 is written by one daemon; the other finds it and reads it. */
static void pass_on(struct store *from, struct store *to) {
    look(from);
    cr_assert_eq(save(from, 1, 100), 0);
    cr_assert_eq(find_whole(to, 1), 501);
    cr_assert_eq(load(to, 501), 0);
}

/* ---- Finding ---- */

Test(store_shared, what_one_daemon_writes_another_continues) {
    struct store *a = open_store(), *b = open_store();
    uint8_t keys[2][16];
    store_space_key(a, keys[0]);
    store_space_key(b, keys[1]);
    cr_assert_eq(memcmp(keys[0], keys[1], 16), 0, "spaces mean the same to both");
    pass_on(a, b);
    cr_assert_eq(find_whole(a, 1), 501, "and the first still can");
    cr_assert_eq(save(b, 2, 100), 0);
    cr_assert_eq(find_whole(a, 2), 502);
    cr_assert_eq(load(a, 502), 0);
    cr_assert(stats_of(a).files == 2 && stats_of(b).files == 2);
    cr_assert_eq(stats_of(a).bytes, bytes_there());
    cr_assert_eq(stats_of(b).bytes, bytes_there());
    store_close(a);
    store_close(b);
}

Test(store_shared, what_one_daemon_deletes_others_forget) {
    struct store *a = open_store(), *b = open_store();
    look(a);
    cr_assert_eq(save(a, 1, 100), 0);
    cr_assert_eq(find_whole(b, 1), 501);
    cr_assert_eq(store_remove(b, 501), 0);
    cr_assert_eq(find_whole(a, 1), 0);
    cr_assert(stats_of(a).files == 0 && stats_of(a).bytes == 0);
    store_close(a);
    store_close(b);
}

/* A listing that is older than the job may lack what was written before the job came. */
Test(store_shared, an_index_is_fresh_only_after_a_listing) {
    struct store_options options = options_of();
    struct store *a, *b = open_store();
    struct fault fault;
    options.inline_io = false;
    cr_assert_eq(store_open(&options, &a, &fault), 0);
    int64_t now = clock_ns();
    cr_assert_not(store_fresh(a, now), "nothing was listed since then");
    while (!store_fresh(a, now)) usleep(1000);
    cr_assert(store_fresh(a, now - 1));
    store_close(b);
    store_close(a);
}

/* Alone, a daemon lists nothing: it knows every file that it wrote. */
Test(store_shared, a_daemon_alone_need_not_list) {
    struct store *a = open_store(), *b = open_store();
    look(b);
    store_close(a);
    look(b); /* the last listing shows what the other left */
    uint64_t before = store_progress(b);
    cr_assert(store_fresh(b, clock_ns()));
    cr_assert_eq(store_progress(b), before);
    store_close(b);
}

/* Equal conversations have equal names, so the second copy replaces the first. */
Test(store_shared, a_conversation_is_there_once) {
    struct store *a = open_store(), *b = open_store();
    look(a);
    cr_assert_eq(save(a, 1, 100), 0);
    cr_assert_eq(save(b, 1, 60), 0); /* without having looked */
    look(a);
    look(b);
    cr_assert_eq(files_with(".state"), 1);
    cr_assert_eq(stats_of(b).bytes, bytes_there());
    cr_assert_eq(load(a, 501), 0);
    cr_assert_eq(save(a, 1, 100), 0);
    cr_assert(stats_of(a).files == 1 && stats_of(a).bytes == bytes_there());
    store_close(a);
    store_close(b);
}

/* ---- Leases ---- */

/* A file that a newer turn replaced stays while another daemon may be continuing it, too. */
Test(store_shared, a_lease_keeps_a_replaced_file) {
    struct store *a = open_store(), *b = open_store();
    pass_on(a, b);
    set_age(name_1, 1); /* the clock of the file system may not have moved since */
    store_remove_replaced(a, 501);
    cr_assert(is_there(name_1));
    cr_assert_eq(find_whole(a, 1), 501, "it is still there to be continued");
    set_age(name_1, -2 * STATE_LEASE_SECONDS);
    store_remove_replaced(a, 501);
    cr_assert_not(is_there(name_1), "the lease has expired");
    store_close(a);
    store_close(b);
}

/* A use by another daemon is not forgotten when this one learns of it as it looks for the oldest
 * file. */
Test(store_shared, a_lease_that_was_seen_keeps_a_replaced_file) {
    struct store_options options = options_of();
    struct store *a, *b = open_store();
    struct fault fault = {0};
    options.bytes = 5 * (int64_t)state_file_size(TOKENS, 2, 100) / 2; /* two files fit */
    cr_assert_eq(store_open(&options, &a, &fault), 0);
    look(a);
    cr_assert_eq(save(a, 1, 100), 0);
    cr_assert_eq(save(a, 2, 100), 0);
    cr_assert_eq(find_whole(b, 1), 501);
    cr_assert_eq(load(b, 501), 0);
    set_age(name_1, 1); /* the clock of the file system may not have moved since */
    cr_assert_eq(save(a, 3, 100), 0);
    cr_assert(is_there(name_1), "it is not the oldest");
    cr_assert_eq(files_with(".state"), 2);
    store_remove_replaced(a, 501);
    cr_assert(is_there(name_1));
    store_close(a);
    store_close(b);
}

/* Files that a listing finds are as old as their time stamps say, whatever order it has. */
Test(store_shared, a_listing_puts_files_in_the_order_of_their_use) {
    struct store *a = open_store(), *b = open_store();
    const int ages[] = {-40, -10, -70, -30, -20, -60, -50};
    const struct engine_conversation_filter all = {0};
    struct store_row rows[8];
    look(b);
    for (int i = 0; i < 7; i++) {
        char name[32];
        cr_assert_eq(save(a, 1 + i, 100), 0);
        snprintf(name, sizeof name, "%016llx.state", 501ull + (unsigned)i);
        set_age(name, ages[i]);
    }
    look(b);
    cr_assert_eq(store_list(b, &all, rows, 8), 7);
    const uint64_t newest_first[] = {502, 505, 504, 501, 507, 506, 503};
    for (int i = 0; i < 7; i++) cr_assert_eq(rows[i].id, newest_first[i], "%d", i);
    store_close(a);
    store_close(b);
}

/* Nobody else used it, or there is nobody else: it goes. So does one that a client deletes. */
Test(store_shared, without_a_lease_a_replaced_file_goes) {
    for (int i = 0; i < 3; i++) {
        struct store *a = open_store(), *b = i == 1 ? NULL : open_store();
        look(a);
        cr_assert_eq(save(a, 1, 100), 0);
        if (i > 0) set_age(name_1, 1);
        if (i == 2)
            cr_assert_eq(store_remove(a, 501), 0);
        else
            store_remove_replaced(a, 501);
        cr_assert_not(is_there(name_1), "%d", i);
        store_close(a);
        store_close(b);
    }
}

Test(store_shared, leases_end_with_their_daemons) {
    struct store *a = open_store(), *b = open_store();
    store_close(b);
    char path[80];
    snprintf(path, sizeof path, "%s/daemons", dir);
    DIR *list = opendir(path);
    int count = 0;
    for (const struct dirent *entry; (entry = readdir(list)) != NULL;)
        count += entry->d_name[0] != '.';
    closedir(list);
    cr_assert_eq(count, 1);
    store_close(a);
    cr_assert_eq(rmdir(path), 0, "no lease is left");
}

static struct state_lease open_lease(int fd) {
    struct state_lease lease;
    struct fault fault = {0};
    cr_assert_eq(state_lease_open(&lease, fd, &fault), 0, "%s", fault.text);
    return lease;
}

Test(store_shared, leases_expire) {
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    struct state_lease a = open_lease(fd), b = open_lease(fd);
    char name[64];
    cr_assert(b.count == 1 && state_lease_lives(&b, a.number) && a.number != b.number);
    state_lease_renew(&a);
    cr_assert(a.count == 1 && state_lease_lives(&a, b.number) && state_lease_lives(&a, a.number));
    snprintf(name, sizeof name, "daemons/%016llx", (unsigned long long)b.number);
    set_age(name, 30); /* a clock that is ahead */
    state_lease_renew(&a);
    cr_assert_eq(a.count, 1);
    set_age(name, -STATE_LEASE_SECONDS / 2); /* or behind */
    state_lease_renew(&a);
    cr_assert_eq(a.count, 1);
    set_age(name, -2 * STATE_LEASE_SECONDS);
    state_lease_renew(&a);
    cr_assert(a.count == 0 && !state_lease_lives(&a, b.number) && is_there(name));
    set_age(name, -20 * STATE_LEASE_SECONDS);
    state_lease_renew(&a);
    cr_assert(!is_there(name), "removed");
    state_lease_renew(&b); /* the daemon only hung, and makes its lease again */
    cr_assert(is_there(name));
    state_lease_renew(&a);
    cr_assert_eq(a.count, 1);
    state_lease_close(&a);
    state_lease_close(&b);
    close(fd);
}

/* A clock that was wrong for a while must not leave a lease that never expires. */
Test(store_shared, leases_from_the_future_expire) {
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    struct state_lease a = open_lease(fd), b = open_lease(fd);
    char name[64];
    snprintf(name, sizeof name, "daemons/%016llx", (unsigned long long)b.number);
    set_age(name, 2 * STATE_LEASE_SECONDS);
    state_lease_renew(&a);
    cr_assert(a.count == 0 && !state_lease_lives(&a, b.number) && is_there(name));
    set_age(name, 20 * STATE_LEASE_SECONDS);
    state_lease_renew(&a);
    cr_assert(!is_there(name), "removed");
    state_lease_close(&a);
    state_lease_close(&b);
    close(fd);
}

/* A daemon that writes or reads a long file, or lists many, lives. */
Test(store_shared, long_work_keeps_the_lease) {
    struct store *store = open_store();
    struct state_dir worker;
    struct state_head head;
    struct state_view view = {0};
    struct state_dir_file taken;
    struct fault fault;
    cr_assert_eq(state_dir_open(&worker, dir, &fault), 0);
    struct state_lease other = open_lease(worker.fd);
    char lease[64], *data = make_file(store, 1, 100, &head), *again = NULL;
    snprintf(lease, sizeof lease, "daemons/%016llx", (unsigned long long)worker.lease.number);
    for (int i = 0; i < 3; i++) {
        set_age(lease, -2 * STATE_LEASE_SECONDS);
        worker.lease.stamped_ns -= (int64_t)2 * STATE_LEASE_SECONDS * 1000000000;
        cr_assert_not(state_lease_lives(&other, worker.lease.number));
        if (i == 0) cr_assert_eq(state_dir_write(&worker, 501, data, head.file_size), 0);
        if (i == 1) cr_assert_eq(state_dir_read(&worker, 501, &again, &view, &taken, &fault), 0);
        if (i == 2) cr_assert_eq(state_dir_read_head(&worker, 501, &taken, &head, &fault), 0);
        cr_assert(state_lease_lives(&other, worker.lease.number), "%d", i);
    }
    state_view_close(&view);
    mem_free(data);
    mem_free(again);
    state_lease_close(&other);
    state_dir_close(&worker);
    store_close(store);
}

/* Strange names among the leases are nobody's. */
Test(store_shared, names_that_are_no_leases) {
    store_close(open_store());
    touch("daemons/x");
    touch("daemons/00000000000000AB");
    touch("daemons/00000000000000ab0");
    struct store *store = open_store();
    cr_assert(store_fresh(store, INT64_MAX), "alone");
    store_close(store);
    cr_assert_eq(unlink(path_of("daemons/x")), 0);
    cr_assert_eq(unlink(path_of("daemons/00000000000000AB")), 0);
    cr_assert_eq(unlink(path_of("daemons/00000000000000ab0")), 0);
}

/* ---- Files that are being written ---- */

/* Files that a live daemon is writing count, and stay; those of a dead one go. */
Test(store_shared, unfinished_files) {
    struct store *a = open_store();
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    struct state_lease b = open_lease(fd);
    char live[64], lease[64];
    const char *dead = ".00000000000001f5.00000000000000ff.tmp", *old = ".00000000000001f5.tmp";
    snprintf(live, sizeof live, ".00000000000001f6.%016llx.tmp", (unsigned long long)b.number);
    touch(dead);
    touch(live);
    touch(old);
    look(a);
    cr_assert(is_there(live) && !is_there(dead));
    cr_assert(is_there(old), "its writer has no number: it may live");
    snprintf(lease, sizeof lease, "daemons/%016llx", (unsigned long long)b.number);
    set_age(lease, -2 * STATE_LEASE_SECONDS);
    store_close(a);
    a = open_store();
    cr_assert(!is_there(live) && !is_there(old));
    store_close(a);
    state_lease_close(&b);
    close(fd);
}

/* The end of a lease does not change the directory, and yet it is listed once more. */
Test(store_shared, unfinished_files_of_a_daemon_that_was_killed) {
    struct store *a = open_store();
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    struct state_lease b = open_lease(fd), c = open_lease(fd);
    for (int i = 0; i < 2; i++) {
        const struct state_lease *killed = i == 0 ? &b : &c; /* beside a third daemon, and alone */
        char live[64], lease[64];
        snprintf(live, sizeof live, ".00000000000001f6.%016llx.tmp",
                 (unsigned long long)killed->number);
        snprintf(lease, sizeof lease, "daemons/%016llx", (unsigned long long)killed->number);
        touch(live);
        set_age(".", -10); /* a listing of a directory that is changing now is repeated anyway */
        look(a);
        cr_assert(is_there(live));
        set_age(lease, -2 * STATE_LEASE_SECONDS);
        look(a);
        cr_assert_eq(load(a, 999), ERR_NOTFOUND); /* any work does what is due first */
        cr_assert_not(is_there(live), "%d", i);
    }
    state_lease_close(&b);
    state_lease_close(&c);
    store_close(a);
    close(fd);
}

/* A daemon that began after the others' leases were looked at is alive, too. */
Test(store_shared, a_file_of_a_daemon_that_just_began_stays) {
    struct store *a = open_store();
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    struct state_dir old = {.path = dir, .fd = fd, .lock_file = -1, .lease = open_lease(fd)};
    struct state_lease b = open_lease(fd);
    char live[64];
    int64_t unfinished;
    struct fault fault;
    snprintf(live, sizeof live, ".00000000000001f6.%016llx.tmp", (unsigned long long)b.number);
    touch(live);
    cr_assert_eq(state_dir_list(&old, NULL, NULL, &unfinished, &fault), 0);
    cr_assert(is_there(live));
    state_lease_close(&old.lease);
    state_lease_close(&b);
    close(fd);
    store_close(a);
    cr_assert_eq(unlink(path_of(live)), 0);
}

/* ---- Room ---- */

/* Three daemons write in turn: all files together stay within the bytes, and the oldest go first,
 * whoever wrote them. */
Test(store_shared, the_bytes_of_all_are_bounded) {
    struct store_options options = options_of();
    struct store *stores[3];
    struct fault fault;
    options.bytes = (int64_t)state_file_size(TOKENS, 2, 1000) * 4;
    for (int i = 0; i < 3; i++) cr_assert_eq(store_open(&options, &stores[i], &fault), 0);
    for (int i = 0; i < 3; i++) look(stores[i]);
    for (int i = 0; i < 12; i++) {
        char name[32];
        cr_assert_eq(save(stores[i % 3], i, 1000), 0);
        cr_assert_leq(bytes_there(), options.bytes);
        snprintf(name, sizeof name, "%016x.state", 500 + i);
        set_age(name, i - 100); /* apart, so that their order does not hang on the clock's tick */
        snprintf(name, sizeof name, "%016x.state", 500 + i - 4);
        cr_assert(i < 4 || !is_there(name), "%d", i);
    }
    cr_assert_eq(files_with(".state"), 4);
    for (int i = 0; i < 3; i++) store_close(stores[i]);
}

/* A file that another daemon used is not the oldest any more. */
Test(store_shared, use_by_another_daemon_counts) {
    struct store_options options = options_of();
    struct store *a, *b;
    struct fault fault;
    options.bytes = (int64_t)state_file_size(TOKENS, 2, 1000) * 2;
    cr_assert_eq(store_open(&options, &a, &fault), 0);
    cr_assert_eq(store_open(&options, &b, &fault), 0);
    look(a);
    cr_assert_eq(save(a, 1, 1000), 0);
    cr_assert_eq(save(a, 2, 1000), 0);
    cr_assert_eq(find_whole(b, 1), 501);
    cr_assert_eq(load(b, 501), 0);
    set_age(name_1, 1);
    cr_assert_eq(save(a, 3, 1000), 0);
    cr_assert(is_there(name_1) && files_with(".state") == 2);
    store_close(a);
    store_close(b);
}

/* A file that the daemon of a lease has begun; returns its name. */
static const char *begin_file(const struct state_lease *lease, const char *suffix, int64_t size) {
    static char name[64];
    snprintf(name, sizeof name, ".00000000000001f6.%016llx.%s", (unsigned long long)lease->number,
             suffix);
    touch(name);
    cr_assert_eq(truncate(path_of(name), size), 0);
    return name;
}

/* Bytes that another daemon is writing count as if they were there. */
Test(store_shared, bytes_on_the_way_count) {
    struct store_options options = options_of();
    struct store *a;
    struct fault fault;
    int64_t size = (int64_t)state_file_size(TOKENS, 2, 1000);
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    struct state_lease b = open_lease(fd);
    options.bytes = size * 2;
    cr_assert_eq(store_open(&options, &a, &fault), 0);
    cr_assert_eq(save(a, 1, 1000), 0);
    begin_file(&b, "tmp", size);
    cr_assert_eq(save(a, 2, 1000), 0);
    cr_assert_eq(files_with(".state"), 1);
    store_close(a);
    state_lease_close(&b);
    close(fd);
}

/* Bytes that clients upload displace nothing before they are checked, whoever receives them; those
 * of a daemon that has ended are deleted. */
Test(store_shared, uploads_displace_nothing) {
    struct store_options options = options_of();
    struct store *a;
    struct fault fault;
    int64_t size = (int64_t)state_file_size(TOKENS, 2, 1000);
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    struct state_lease b = open_lease(fd);
    const char *dead = ".00000000000001f7.00000000000000ff.part";
    options.bytes = size * 2;
    cr_assert_eq(store_open(&options, &a, &fault), 0);
    cr_assert_eq(save(a, 1, 1000), 0);
    const char *live = begin_file(&b, "part", size);
    touch(dead);
    look(a);
    cr_assert_eq(save(a, 2, 1000), 0);
    cr_assert_eq(files_with(".state"), 2);
    cr_assert(is_there(live) && !is_there(dead));
    store_close(a);
    state_lease_close(&b);
    close(fd);
}

/* A daemon neither counts nor deletes what it is writing itself. */
Test(store_shared, its_own_unfinished_files) {
    struct state_dir own;
    struct fault fault;
    int64_t unfinished;
    cr_assert_eq(state_dir_open(&own, dir, &fault), 0);
    const char *mine = begin_file(&own.lease, "tmp", 1000);
    cr_assert_eq(state_dir_list(&own, NULL, NULL, &unfinished, &fault), 0);
    cr_assert(is_there(mine) && unfinished == 0);
    state_dir_close(&own);
}

/* ---- Starting at once ---- */

static void *open_directory(void *arg) {
    struct fault fault = {0};
    return (void *)(intptr_t)state_dir_open(arg, dir, &fault);
}

/* Daemons that start at once on a new directory agree on its key. */
Test(store_shared, one_key_for_all) {
    enum { DAEMONS = 8 };
    struct state_dir dirs[DAEMONS];
    pthread_t threads[DAEMONS];
    for (int i = 0; i < DAEMONS; i++)
        cr_assert_eq(pthread_create(&threads[i], NULL, open_directory, &dirs[i]), 0);
    for (int i = 0; i < DAEMONS; i++) {
        void *rc;
        cr_assert_eq(pthread_join(threads[i], &rc), 0);
        cr_assert_eq((intptr_t)rc, 0);
        cr_assert_eq(memcmp(dirs[i].key, dirs[0].key, SHA256_BYTES), 0, "%d", i);
    }
    for (int i = 0; i < DAEMONS; i++) state_dir_close(&dirs[i]);
    cr_assert_eq(files_with(".tmp"), 0);
}

/* A file system without hard links, and perhaps without a rename that replaces nothing. Another
 * daemon names its key just before this one does. */
static struct { bool planned, no_exclusive_rename, rival; } links;

int __real_linkat(int from, const char *old, int to, const char *new, int flags);
int __real_renameat2(int from, const char *old, int to, const char *new, unsigned flags);
int __wrap_linkat(int from, const char *old, int to, const char *new, int flags);
int __wrap_renameat2(int from, const char *old, int to, const char *new, unsigned flags);

int __wrap_linkat(int from, const char *old, int to, const char *new, int flags) {
    if (!links.planned) return __real_linkat(from, old, to, new, flags);
    if (links.rival) {
        int fd = openat(to, "key", O_WRONLY | O_CREAT | O_EXCL, 0600);
        cr_assert(fd >= 0 && write(fd, "the key of the rival is 32 bytes", 32) == 32);
        close(fd);
    }
    errno = EPERM;
    return -1;
}

int __wrap_renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
    if (!links.no_exclusive_rename) return __real_renameat2(from, old, to, new, flags);
    errno = EINVAL;
    return -1;
}

Test(store_shared, a_key_is_named_once_without_hard_links) {
    struct state_dir own;
    struct fault fault = {0};
    links.planned = links.rival = true;
    cr_assert_eq(state_dir_open(&own, dir, &fault), 0);
    cr_assert_eq(memcmp(own.key, "the key of the rival is 32 bytes", 32), 0);
    state_dir_close(&own);
    cr_assert_eq(files_with(".tmp"), 0);
}

Test(store_shared, a_new_directory_without_hard_links) {
    for (int i = 0; i < 2; i++) {
        struct state_dir first, second;
        struct fault fault = {0};
        links.planned = true;
        links.no_exclusive_rename = i;
        cr_assert_eq(state_dir_open(&first, dir, &fault), 0);
        cr_assert_eq(state_dir_open(&second, dir, &fault), 0);
        cr_assert_eq(memcmp(first.key, second.key, SHA256_BYTES), 0);
        state_dir_close(&first);
        state_dir_close(&second);
        cr_assert(files_with(".tmp") == 0 && unlink(path_of("key")) == 0);
    }
}

/* ---- Both write at once ---- */

static void *write_some(void *arg) {
    struct store *store = arg;
    for (int i = 0; i < 20; i++) {
        struct state_head head;
        uint64_t id;
        int rc;
        char *data = make_file(store, i, 100, &head);
        store_save(store, &head, data, head.file_size);
        while (!store_saved(store, &id, &rc)) usleep(100);
        cr_assert_eq(rc, 0);
        while (!store_fresh(store, clock_ns() - 100000000)) usleep(100);
        (void)find(store, (i * 7) % 20, TOKENS, "space", 32, 0);
    }
    return NULL;
}

/* With their threads, two daemons write the same conversations, list, and find. */
Test(store_shared, two_daemons_write_the_same) {
    struct store_options options = options_of();
    struct store *stores[2];
    struct fault fault;
    pthread_t threads[2];
    options.inline_io = false;
    for (int i = 0; i < 2; i++) cr_assert_eq(store_open(&options, &stores[i], &fault), 0);
    for (int i = 0; i < 2; i++)
        cr_assert_eq(pthread_create(&threads[i], NULL, write_some, stores[i]), 0);
    for (int i = 0; i < 2; i++) cr_assert_eq(pthread_join(threads[i], NULL), 0);
    for (int i = 0; i < 2; i++) store_close(stores[i]);
    cr_assert_eq(files_with(".state"), 20);
    struct store *store = open_store();
    for (int i = 0; i < 20; i++) cr_assert_eq(load(store, 500 + (uint64_t)i), 0);
    cr_assert_eq(stats_of(store).refused, 0);
    store_close(store);
}
