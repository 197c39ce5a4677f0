/* Tests engine/disk/store.c on real files: what is kept comes back after a new start, and whatever
 * else lies in the directory is refused, put aside and survived. Failing system calls are linked
 * in. */
#include <criterion/criterion.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/mem.h"
#include "engine/disk/state_dir.h"
#include "engine/disk/store.h"
#include "engine/disk/store_index.h"
#include "tests/unit/engine/store_bed.h"

/* ---- Failing calls ---- */

/* The n-th of these calls fails (n < 0: none). Names are the linker's: --wrap. */
static long fail_left = -1;

static bool fails(int error) {
    if (fail_left < 0) return false;
    if (fail_left-- > 0) return false;
    errno = error;
    return true;
}

ssize_t __real_write(int fd, const void *data, size_t size);
ssize_t __wrap_write(int fd, const void *data, size_t size);
int __real_fdatasync(int fd);
int __wrap_fdatasync(int fd);
int __real_fsync(int fd);
int __wrap_fsync(int fd);
int __real_renameat(int from_dir, const char *from, int to_dir, const char *to);
int __wrap_renameat(int from_dir, const char *from, int to_dir, const char *to);
int __real_unlinkat(int at, const char *name, int flags);
int __wrap_unlinkat(int at, const char *name, int flags);

ssize_t __wrap_write(int fd, const void *data, size_t size) {
    return fd > 2 && fails(ENOSPC) ? -1 : __real_write(fd, data, size);
}

static int syncs;

int __wrap_fdatasync(int fd) {
    syncs++;
    return fails(EIO) ? -1 : __real_fdatasync(fd);
}

int __wrap_fsync(int fd) {
    return fails(EIO) ? -1 : __real_fsync(fd);
}

int __wrap_renameat(int from_dir, const char *from, int to_dir, const char *to) {
    return fails(EIO) ? -1 : __real_renameat(from_dir, from, to_dir, to);
}

static bool deleting_fails;

int __wrap_unlinkat(int at, const char *name, int flags) {
    errno = EACCES;
    return deleting_fails ? -1 : __real_unlinkat(at, name, flags);
}

TestSuite(store, .init = make_dir, .fini = remove_dir);

/* ---- Stores that do not open ---- */

/* --check-config rejects it too, with the same message; except for the lock, which a running server
 * holds. */
static int refuse_open(const char *says) {
    struct store_options options = options_of();
    struct store *store;
    struct fault fault = {0}, checked = {0};
    int check = state_dir_check(options.dir, &checked);
    int rc = store_open(&options, &store, &fault);
    cr_assert(rc != 0 && !store);
    cr_assert_str_eq(fault.field, "state-dir");
    cr_assert_not_null(strstr(fault.text, says), "'%s'", fault.text);
    cr_assert_eq(check, rc == ERR_BUSY ? 0 : rc, "'%s'", checked.text);
    if (rc != ERR_BUSY) cr_assert_str_eq(checked.text, fault.text);
    return rc;
}

/* ---- Written files ---- */

Test(store, comes_back_after_a_new_start) {
    struct store *store = open_store();
    uint8_t before[16], after[16];
    store_space_key(store, before);
    cr_assert_eq(save(store, 1, 100), 0);
    cr_assert_eq(save(store, 2, 200), 0);
    store_close(store);
    store = open_store();
    store_space_key(store, after);
    cr_assert_eq(memcmp(before, after, sizeof before), 0, "spaces mean something else now");
    cr_assert(stats_of(store).files == 2 && stats_of(store).refused == 0);
    cr_assert_eq(find(store, 1, TOKENS, "space", 32, 0), 501);
    cr_assert_eq(find(store, 2, PROMPT, "space", 32, 0), 502); /* the answer is dropped */
    cr_assert_eq(find(store, 2, PROMPT - 1, "space", 32, 0), 0);
    cr_assert_eq(find(store, 1, TOKENS, "other", 32, 0), 0);
    cr_assert_eq(find(store, 1, TOKENS, "space", 33, 0), 0);
    cr_assert_eq(find(store, 1, TOKENS, "space", 32, TOKENS - 1), 501);
    cr_assert_eq(find(store, 1, TOKENS, "space", 32, TOKENS), 0, "memory has as much");
    cr_assert_eq(load(store, 501), 0);
    cr_assert_eq(load(store, 502), 0);
    cr_assert_eq(load(store, 503), ERR_NOTFOUND);
    store_ignore(store, 501);
    cr_assert_eq(find(store, 1, TOKENS, "space", 32, 0), 0);
    store_close(store);
}

/* A search need not be repeated until this number changes. */
Test(store, changes_tell_when_to_search_again) {
    struct store *store = open_store(), *other = store_join(store, NULL, NULL);
    cr_assert_eq(save(store, 1, 100), 0);
    cr_assert_eq(save(store, 2, 100), 0);
    cr_assert_eq(find(store, 1, TOKENS, "space", 32, 0), 501);
    uint64_t before = store_changes(store);
    cr_assert_eq(find(store, 1, TOKENS, "space", 32, 0), 501);
    cr_assert_eq(load(store, 501), 0);
    cr_assert_eq(store_changes(store), before);
    for (int i = 0; i < 4; i++) {
        if (i == 0) cr_assert_eq(save(other, 3, 100), 0);
        if (i == 1) store_ignore(store, 501);
        if (i == 2) cr_assert_eq(store_remove(store, 502), 0);
        if (i == 3) store_close(other); /* conversations of a closed store belong to any other */
        cr_assert_gt(store_changes(store), before, "%d", i);
        before = store_changes(store);
    }
    cr_assert_eq(find(store, 3, TOKENS, "space", 32, 0), 503);
    cr_assert_gt(store_changes(store), before, "found by the first");
    store_close(store);
}

Test(store, removing) {
    struct store *store = open_store();
    cr_assert_eq(save(store, 1, 100), 0);
    cr_assert(store_has(store, 501));
    cr_assert_eq(store_remove(store, 501), 0);
    cr_assert_eq(store_remove(store, 501), ERR_NOTFOUND);
    cr_assert(!store_has(store, 501) && files_with(".state") == 0);
    cr_assert(stats_of(store).files == 0 && stats_of(store).bytes == 0);
    store_close(store);
}

Test(store, all_files_stay_within_their_bytes) {
    struct store_options options = options_of();
    struct store *store;
    struct fault fault;
    size_t size = state_file_size(TOKENS, 2, 1000);
    options.bytes = (int64_t)size * 3;
    cr_assert_eq(store_open(&options, &store, &fault), 0);
    for (int i = 1; i <= 3; i++) cr_assert_eq(save(store, i, 1000), 0);
    cr_assert_eq(stats_of(store).files, 3);
    for (int i = 4; i <= 6; i++) {
        cr_assert_eq(save(store, i, 1000), 0);
        cr_assert(stats_of(store).files == 3 && files_with(".state") == 3);
        cr_assert(stats_of(store).bytes <= options.bytes && store_has(store, 500 + (uint64_t)i));
    }
    cr_assert_eq(save(store, 7, 3 * size), ERR_LIMIT, "larger than all together");
    cr_assert(stats_of(store).failed == 1 && stats_of(store).files == 3);
    store_close(store);
}

/* With a smaller limit than before, the oldest files are deleted at startup. */
Test(store, fewer_bytes_than_before) {
    struct store_options options = options_of();
    struct store *store = open_store();
    struct fault fault;
    for (int i = 1; i <= 3; i++) cr_assert_eq(save(store, i, 1000), 0);
    store_close(store);
    options.bytes = (int64_t)state_file_size(TOKENS, 2, 1000) * 2;
    cr_assert_eq(store_open(&options, &store, &fault), 0);
    cr_assert(stats_of(store).files == 2 && files_with(".state") == 2);
    store_close(store);
}

/* Age is the time of the last use, regardless of the order in which the files were found. */
Test(store, the_order_after_a_new_start) {
    struct store_options options = options_of();
    struct store *store = open_store();
    struct fault fault;
    for (int i = 1; i <= 5; i++) {
        char name[32];
        const struct timespec times[2] = {{.tv_sec = 1000 - i * i % 7},
                                          {.tv_sec = 1000 - i * i % 7}};
        cr_assert_eq(save(store, i, 1000), 0);
        snprintf(name, sizeof name, "%016x.state", 500 + i);
        cr_assert_eq(utimensat(AT_FDCWD, path_of(name), times, 0), 0);
    } /* 1 4 2 2 4 before 1000: of the oldest, 2 and 5, one may go first */
    store_close(store);
    options.bytes = (int64_t)state_file_size(TOKENS, 2, 1000) * 3;
    cr_assert_eq(store_open(&options, &store, &fault), 0);
    cr_assert(store_has(store, 501) && store_has(store, 503) && store_has(store, 504));
    cr_assert_eq(stats_of(store).files, 3);
    store_close(store);
}

/* Files that were used at the same time: those of the client that has most go, until it has no more
 * than the other. */
Test(store, a_client_pushes_out_its_own_files) {
    enum { GUESTS = 2, HOGS = 8, ROOM = 5 };
    struct store_options options = options_of();
    struct store *store = open_store();
    const struct timespec times[2] = {{.tv_sec = 1000000}, {.tv_sec = 1000000}};
    struct fault fault;
    for (int i = 1; i <= GUESTS + HOGS; i++) {
        char name[32];
        file_client = i <= GUESTS ? 7 : 8;
        cr_assert_eq(save(store, i, 1000), 0);
        snprintf(name, sizeof name, "%016x.state", 500 + i);
        cr_assert_eq(utimensat(AT_FDCWD, path_of(name), times, 0), 0);
    }
    file_client = 0;
    store_close(store);
    options.bytes = (int64_t)state_file_size(TOKENS, 2, 1000) * ROOM;
    cr_assert_eq(store_open(&options, &store, &fault), 0);
    cr_assert_eq(stats_of(store).files, ROOM);
    cr_assert(store_has(store, 501) && store_has(store, 502), "the guest's");
    store_close(store);
}

/* A client that holds little loses its files, too, once they are old enough. */
Test(store, the_first_to_go) {
    static struct store_index index;
    static const struct {
        uint64_t client;
        int64_t bytes, used_unix;
    } files[] = {{7, 100, 10}, {8, 100, 40}, {8, 200, 50}, {9, 50, 60}};
    cr_assert_null(store_index_first_to_go(&index, 100));
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        const struct store_file file = {.head = {.id = i + 1, .client = files[i].client},
                                        .bytes = files[i].bytes,
                                        .used_unix = files[i].used_unix};
        cr_assert_eq(store_index_add(&index, &file), 0);
    }
    /* seconds + 1, times the bytes of the client: 31 x 100, 1 x 300, ... */
    cr_assert_eq(store_index_first_to_go(&index, 40)->head.id, 1);
    /* 91 x 100, 61 x 300, 51 x 300, 41 x 50 */
    cr_assert_eq(store_index_first_to_go(&index, 100)->head.id, 2);
    store_index_drop(&index, store_index_find(&index, 2, false));
    /* 91 x 100, 51 x 200, 41 x 50 */
    cr_assert_eq(store_index_first_to_go(&index, 100)->head.id, 3);
    store_index_drop(&index, store_index_find(&index, 3, false));
    cr_assert_eq(store_index_first_to_go(&index, 100)->head.id, 1);
    mem_fail_after(0);
    cr_assert_eq(store_index_add(&index, &(struct store_file){.head.client = 10}), ERR_NOMEM);
    mem_fail_after(1);
    cr_assert_eq(store_index_add(&index, &(struct store_file){.head.client = 10}), ERR_NOMEM);
    mem_fail_after(-1);
    store_index_close(&index);
    cr_assert(index.bytes == 0 && index.count == 0 && !index.holders[10]);
}

/* Sets the time of a file's last use, in seconds before now. */
static void set_age(int seed, int seconds) {
    char name[32];
    struct timespec times[2] = {{.tv_sec = time(NULL) - seconds}, {.tv_sec = time(NULL) - seconds}};
    snprintf(name, sizeof name, "%016x.state", 500 + seed);
    cr_assert_eq(utimensat(AT_FDCWD, path_of(name), times, 0), 0);
}

/* A file with a time to live is deleted when it was not used for so long: at a start, and later. */
Test(store, times_to_live) {
    struct store *store = open_store();
    for (int i = 1; i <= 4; i++) {
        struct state_head head;
        char *data = make_living_file(store, i, 1000, i == 4 ? 0 : 100 * i, &head);
        store_save(store, &head, data, head.file_size);
        uint64_t id;
        int rc;
        cr_assert(store_saved(store, &id, &rc) && rc == 0);
    }
    store_close(store);
    set_age(1, 150), set_age(2, 150), set_age(3, 299), set_age(4, 1000000);
    store = open_store();
    cr_assert(!store_has(store, 501) && store_has(store, 502) && store_has(store, 504));
    cr_assert_eq(files_with(".state"), 3);
    store_close(store);
    set_age(3, 310);
    store = open_store();
    cr_assert(!store_has(store, 503) && store_has(store, 502));
    store_close(store);
}

/* A use in memory counts like a read, in the index and on disk. */
Test(store, a_touch_prolongs_the_time_to_live) {
    struct store *store = open_store();
    struct state_head head;
    uint64_t id;
    int rc;
    char *data = make_living_file(store, 1, 1000, 100, &head);
    store_save(store, &head, data, head.file_size);
    cr_assert(store_saved(store, &id, &rc) && rc == 0);
    store_close(store);
    for (int touched = 1; touched >= 0; touched--) {
        set_age(1, 90);
        store = open_store();
        if (touched) store_touch(store, id);
        store_touch(store, 999); /* there is no such file */
        store_close(store);
        struct stat st;
        char name[64];
        snprintf(name, sizeof name, "%016llx.state", (unsigned long long)id);
        cr_assert_eq(stat(path_of(name), &st), 0);
        cr_assert_eq(time(NULL) - st.st_mtime < 45, touched);
    }
}

/* Even within one second the least recently used file is deleted first. */
Test(store, the_order_within_a_second) {
    struct store_options options = options_of();
    struct store *store;
    struct fault fault;
    options.bytes = (int64_t)state_file_size(TOKENS, 2, 1000) * 3;
    cr_assert_eq(store_open(&options, &store, &fault), 0);
    for (int i = 1; i <= 3; i++) cr_assert_eq(save(store, i, 1000), 0);
    cr_assert_eq(load(store, 501), 0); /* the order is 2 3 1 now */
    for (int i = 4; i <= 9; i++) {
        static const int first[] = {2, 3, 1, 4, 5, 6};
        cr_assert_eq(save(store, i, 1000), 0);
        cr_assert_not(store_has(store, 500 + (uint64_t)first[i - 4]), "%d", first[i - 4]);
    }
    store_close(store);
}

Test(store, list) {
    struct store *store = open_store();
    struct store_row rows[3];
    for (int i = 1; i <= 3; i++) cr_assert_eq(save(store, i, 10), 0);
    struct engine_conversation_filter filter = {0};
    cr_assert_eq(store_list(store, &filter, rows, 3), 3);
    cr_assert(rows[0].tokens == TOKENS && rows[0].kv.budget == 32);
    cr_assert_eq(rows[0].bytes, (int64_t)state_file_size(TOKENS, 2, 10));
    cr_assert_eq(store_list(store, &filter, rows, 2), 2);
    filter.id = 503; /* the last one, though there is room for one row only */
    cr_assert(store_list(store, &filter, rows, 1) == 1 && rows[0].id == 503);
    filter.space = rows[0].space;
    cr_assert_eq(store_list(store, &filter, rows + 1, 1), 1);
    filter.space = (const uint8_t *)"somebody else's!";
    cr_assert_eq(store_list(store, &filter, rows, 3), 0);
    store_close(store);
}

/* ---- Rejected files ---- */

static void change_file(const char *name, off_t at, const char *bytes, size_t size) {
    int fd = open(path_of(name), O_WRONLY);
    cr_assert(fd >= 0 && pwrite(fd, bytes, size, at) == (ssize_t)size);
    close(fd);
}

static const char *const name_1 = "00000000000001f5.state"; /* 501 */

/* Whole, genuine, and yet the cache says why it cannot have come from one: put aside. A file that
 * is only not for this process stays as it is, and is not looked at again. */
static int check_rc, members;

static int check_blocks(void *backend, struct state_view *view, struct fault *fault) {
    cr_assert(backend == &check_rc && view->head.block_count == 2);
    view->report.members = members;
    return check_rc != 0 ? fault_set(fault, check_rc, "snapshot", "planned") : 0;
}

Test(store, what_the_cache_says_of_the_blocks) {
    static const int codes[] = {0, ERR_MALFORMED, ERR_INVALID, ERR_UNSUPPORTED, ERR_LIMIT};
    struct store_options options = options_of();
    struct store *store;
    struct fault fault;
    options.check = check_blocks;
    options.backend = &check_rc;
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++) {
        bool bad = codes[i] == ERR_MALFORMED || codes[i] == ERR_INVALID;
        cr_assert_eq(store_open(&options, &store, &fault), 0);
        cr_assert_eq(save(store, 1, 100), 0);
        check_rc = codes[i];
        cr_assert_eq(load(store, 501), codes[i]);
        cr_assert(files_with(".bad") == bad && files_with(".state") == !bad);
        cr_assert_eq(find(store, 1, TOKENS, "space", 32, 0), codes[i] == 0 ? 501 : 0);
        cr_assert_eq(store_remove(store, 501), bad ? ERR_NOTFOUND : 0);
        store_close(store);
        if (bad) cr_assert_eq(unlink(path_of("00000000000001f5.bad")), 0);
    }
}

/* Genuine by its seal, and yet it has more than its policy ever keeps: reservations would be wrong.
 */
Test(store, more_members_than_the_policy_keeps) {
    struct store_options options = options_of();
    struct store *store;
    struct fault fault;
    options.check = check_blocks;
    options.backend = &check_rc;
    cr_assert_eq(store_open(&options, &store, &fault), 0);
    cr_assert_eq(save(store, 1, 100), 0);
    cr_assert_eq(load(store, 501), 0);
    members = 1; /* global has no classes */
    cr_assert_eq(load(store, 501), ERR_MALFORMED);
    cr_assert_eq(files_with(".bad"), 1);
    store_close(store);
}

/* The same file is rejected again: it replaces the first one set aside, also in the counts. */
Test(store, what_is_put_aside_is_counted_once) {
    struct store *store;
    int64_t bytes = 0;
    for (int i = 0; i < 3; i++) {
        store = open_store();
        if (i > 0) cr_assert_eq(stats_of(store).bytes, bytes);
        cr_assert_eq(save(store, 1, 100), 0);
        change_file(name_1, 450, "x", 1);
        cr_assert_eq(load(store, 501), ERR_MALFORMED);
        cr_assert(files_with(".bad") == 1 && files_with(".state") == 0);
        cr_assert(i == 0 || stats_of(store).bytes == bytes);
        bytes = stats_of(store).bytes;
        store_close(store);
    }
}

/* A bad file that cannot be set aside keeps its name, and is deleted by it when room is needed. */
Test(store, what_cannot_be_renamed_is_not_lost_sight_of) {
    struct store_options options = options_of();
    struct store *store;
    struct fault fault;
    options.bytes = (int64_t)state_file_size(TOKENS, 2, 100);
    cr_assert_eq(store_open(&options, &store, &fault), 0);
    cr_assert_eq(save(store, 1, 100), 0);
    change_file(name_1, 450, "x", 1);
    fail_left = 0; /* the rename */
    cr_assert_eq(load(store, 501), ERR_MALFORMED);
    cr_assert_eq(fail_left, -1);
    cr_assert_eq(find(store, 1, TOKENS, "space", 32, 0), 0);
    cr_assert_eq(save(store, 2, 100), 0);
    cr_assert(files_with(".state") == 1 && files_with(".bad") == 0);
    store_close(store);
}

/* The directory's permission does not allow it: the text goes all the same. */
Test(store, what_cannot_be_deleted_is_emptied) {
    struct stat st;
    struct store *store = open_store();
    cr_assert_eq(save(store, 1, 100), 0);
    deleting_fails = true;
    cr_assert_eq(store_remove(store, 501), 0);
    store_close(store);
    deleting_fails = false;
    cr_assert(stat(path_of(name_1), &st) == 0 && st.st_size == 0);
    store = open_store();
    cr_assert(!store_has(store, 501));
    store_close(store);
}

/* Another process deleted the file. */
Test(store, a_file_that_vanished_is_forgotten) {
    struct store *store = open_store();
    cr_assert_eq(save(store, 1, 100), 0);
    cr_assert_eq(unlink(path_of(name_1)), 0);
    cr_assert_eq(load(store, 501), ERR_NOTFOUND);
    cr_assert(stats_of(store).files == 0 && stats_of(store).bytes == 0);
    store_close(store);
}

/* Damage found only by reading: the file is set aside and counted, and the next one is served. */
Test(store, damaged_files_are_put_aside) {
    struct store *store = open_store();
    for (int i = 1; i <= 2; i++) cr_assert_eq(save(store, i, 100), 0);
    change_file(name_1, 450, "x", 1);
    cr_assert_eq(find(store, 1, TOKENS, "space", 32, 0), 501);
    cr_assert_eq(load(store, 501), ERR_MALFORMED);
    cr_assert_eq(find(store, 1, TOKENS, "space", 32, 0), 0);
    cr_assert(files_with(".bad") == 1 && files_with(".state") == 1);
    cr_assert(stats_of(store).refused == 1 && stats_of(store).files == 1);
    cr_assert_eq(load(store, 502), 0);
    store_close(store);
    store = open_store(); /* a file set aside stays so, and its bytes count */
    cr_assert(stats_of(store).refused == 0 && stats_of(store).files == 1);
    cr_assert_gt(stats_of(store).bytes, 2 * 100);
    store_close(store);
}

/* A sparse file of 3 GiB takes no disk: it is refused by its head, before anybody reads it whole.
 */
Test(store, a_file_longer_than_its_conversation_is_not_read) {
    struct store *store = open_store();
    uint64_t size = (uint64_t)3 << 30;
    cr_assert_eq(save(store, 1, 100), 0);
    change_file(name_1, 16, (const char *)&size, sizeof size);
    cr_assert_eq(truncate(path_of(name_1), (off_t)size), 0);
    uint64_t before = store_progress(store);
    cr_assert_eq(load(store, 501), ERR_MALFORMED);
    cr_assert_leq(store_progress(store) - before, 2);
    cr_assert_eq(files_with(".bad"), 1);
    store_close(store);
}

Test(store, torn_files_are_put_aside_at_start) {
    struct store *store = open_store();
    for (int i = 1; i <= 3; i++) cr_assert_eq(save(store, i, 100), 0);
    store_close(store);
    cr_assert_eq(truncate(path_of(name_1), 300), 0);
    cr_assert_eq(truncate(path_of("00000000000001f6.state"), 17), 0);
    store = open_store();
    cr_assert(stats_of(store).refused == 2 && stats_of(store).files == 1);
    cr_assert_eq(files_with(".bad"), 2);
    cr_assert_eq(load(store, 503), 0);
    store_close(store);
}

/* Complete and well-formed, but signed without this directory's key. */
Test(store, files_of_another_key_are_refused) {
    struct store *store = open_store();
    cr_assert_eq(save(store, 1, 100), 0);
    store_close(store);
    cr_assert_eq(unlink(path_of("key")), 0);
    store = open_store();
    cr_assert_eq(load(store, 501), ERR_INVALID);
    cr_assert(stats_of(store).refused == 1 && files_with(".bad") == 1);
    store_close(store);
}

/* A valid file under another file's name is rejected. */
Test(store, renamed_files_are_refused) {
    struct store *store = open_store();
    cr_assert_eq(save(store, 1, 100), 0);
    store_close(store);
    cr_assert_eq(rename(path_of(name_1), "/tmp/keepd-store-moved"), 0);
    cr_assert_eq(rename("/tmp/keepd-store-moved", path_of("00000000000001f7.state")), 0);
    store = open_store();
    cr_assert(stats_of(store).files == 0 && stats_of(store).refused == 1);
    store_close(store);
}

Test(store, another_models_files_are_left_alone) {
    struct store_options options = options_of();
    struct store *store = open_store();
    struct fault fault;
    cr_assert_eq(save(store, 1, 100), 0);
    store_close(store);
    options.identity.weights[0] = 'x';
    cr_assert_eq(store_open(&options, &store, &fault), 0);
    cr_assert(stats_of(store).files == 0 && stats_of(store).refused == 0);
    cr_assert_gt(stats_of(store).bytes, 0);
    cr_assert_eq(find(store, 1, TOKENS, "space", 32, 0), 0);
    store_close(store);
    store = open_store();
    cr_assert_eq(load(store, 501), 0);
    store_close(store);
}

/* Links, pipes, directories and unknown names are neither followed nor opened. */
Test(store, strange_entries_are_survived) {
    struct store *store = open_store();
    cr_assert_eq(save(store, 1, 100), 0);
    store_close(store);
    cr_assert_eq(symlink(name_1, path_of("00000000000001f8.state")), 0);
    cr_assert_eq(mkfifo(path_of("00000000000001f9.state"), 0600), 0);
    cr_assert_eq(mkdir(path_of("00000000000001fa.state"), 0700), 0);
    static const char *const names[] = {"x.state",
                                        "..state",
                                        "00000000000001F5.state",
                                        "0x000000000001f5.state",
                                        "00000000000001f5.state2",
                                        "0000000000000000.state"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        close(open(path_of(names[i]), O_CREAT | O_WRONLY, 0600));
    close(open(path_of(".00000000000001f5.tmp"), O_CREAT | O_WRONLY, 0600));
    store = open_store();
    cr_assert_eq(stats_of(store).files, 1);
    cr_assert_eq(files_with(".tmp"), 0, "a leftover stayed");
    cr_assert_eq(load(store, 501), 0);
    cr_assert_eq(load(store, 504), ERR_IO);
    store_close(store);
    unlink(path_of("00000000000001f8.state"));
}

/* ---- Opening ---- */

/* A daemon of an earlier version, which shares the directory with nobody, holds the lock so. */
Test(store, a_version_that_shares_nothing) {
    store_close(open_store());
    int fd = open(path_of("lock"), O_RDWR | O_CLOEXEC);
    cr_assert(fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0);
    cr_assert_eq(refuse_open("another keepd"), ERR_BUSY);
    close(fd);
    struct store *store = open_store();
    fd = open(path_of("lock"), O_RDWR | O_CLOEXEC);
    cr_assert(flock(fd, LOCK_EX | LOCK_NB) != 0, "nor does it start beside this version");
    close(fd);
    store_close(store);
}

Test(store, the_key_is_secret_and_whole) {
    struct stat st;
    store_close(open_store());
    cr_assert_eq(stat(path_of("key"), &st), 0);
    cr_assert(st.st_size == 32 && (st.st_mode & 0777) == 0600);
    chmod(path_of("key"), 0640);
    cr_assert_eq(refuse_open("0600"), ERR_INVALID);
    chmod(path_of("key"), 0600);
    cr_assert_eq(truncate(path_of("key"), 31), 0);
    cr_assert_eq(refuse_open("32 bytes"), ERR_INVALID);
    unlink(path_of("key"));
    cr_assert_eq(symlink("/etc/hostname", path_of("key")), 0);
    refuse_open("key");
    unlink(path_of("key"));
}

Test(store, directories_that_cannot_serve) {
    chmod(dir, 0770);
    cr_assert_eq(refuse_open("0700"), ERR_INVALID);
    chmod(dir, 0700);
    char good[64];
    strcpy(good, dir);
    static const char *const never[] = {"/proc/no/such", "/dev/null/below"};
    for (int i = 0; i < 2; i++) {
        strcpy(dir, never[i]);
        cr_assert_eq(refuse_open("cannot be made"), ERR_IO);
    }
    strcpy(dir, "/dev/null");
    cr_assert_eq(refuse_open("cannot be opened"), ERR_IO);
    strcpy(dir, good);
}

Test(store, a_directory_of_somebody_else_cannot_serve) {
    bool root = geteuid() == 0;
    chmod(dir, root ? 0755 : 0500);
    cr_assert(!root || seteuid(65534) == 0);
    cr_assert_eq(refuse_open("cannot be written to"), ERR_IO);
    cr_assert(!root || seteuid(0) == 0);
    chmod(dir, 0700);
}

Test(store, a_check_makes_nothing) {
    struct fault fault = {0};
    char path[512];
    cr_assert_eq(state_dir_check(dir, &fault), 0);
    cr_assert_neq(access(path_of("key"), F_OK), 0);
    snprintf(path, sizeof path, "%s", path_of("new"));
    cr_assert_eq(state_dir_check(path, &fault), 0);
    cr_assert_neq(access(path, F_OK), 0);
}

/* ---- Failures ---- */

/* Each call that can fail while writing: afterwards the file is complete or absent. */
Test(store, failing_writes_leave_nothing) {
    int failed = 0;
    for (long n = 0; failed == n; n++) {
        struct store *store = open_store();
        cr_assert_eq(save(store, 1, 100), 0);
        fail_left = n;
        int rc = save(store, 2, 100);
        bool pending = fail_left >= 0;
        fail_left = -1;
        failed += !pending;
        cr_assert_eq(rc, pending ? 0 : ERR_IO, "call %ld", n);
        cr_assert_eq(files_with(".tmp"), 0);
        cr_assert_eq(store_has(store, 502), rc == 0);
        cr_assert_eq(files_with(".state"), rc == 0 ? 2 : 1);
        cr_assert_eq(load(store, 501), 0);
        cr_assert_eq(save(store, 2, 100), 0); /* the next attempt works */
        cr_assert_eq(store_remove(store, 501) + store_remove(store, 502), 0);
        store_close(store);
    }
    cr_assert_eq(failed, 5, "write, fdatasync, fsync, rename, fsync of the directory");
}

/* The name of a conversation is the same for all daemons, so a copy may be there already. */
Test(store, failing_writes_leave_the_copy_of_another) {
    struct store *a = open_store(), *b = open_store();
    cr_assert_eq(save(a, 1, 100), 0);
    for (long n = 0; n < 5; n++) {
        fail_left = n;
        cr_assert_eq(save(b, 1, 100), ERR_IO, "call %ld", n);
        cr_assert_eq(fail_left, -1);
        cr_assert_eq(files_with(".tmp"), 0);
        cr_assert_eq(load(a, 501), 0, "call %ld", n);
    }
    store_close(b);
    store_close(a);
}

/* A conversation that is longer than the whole directory may be deletes nothing either. */
Test(store, a_write_that_never_fits_leaves_the_copy_of_another) {
    struct store_options options = options_of();
    struct store *a = open_store(), *b;
    struct fault fault;
    options.bytes = 100;
    cr_assert_eq(store_open(&options, &b, &fault), 0);
    cr_assert_eq(save(a, 1, 100), 0);
    cr_assert_eq(save(b, 1, 100), ERR_LIMIT);
    cr_assert_eq(load(a, 501), 0);
    store_close(b);
    store_close(a);
}

Test(store, reading_without_memory_is_no_damage) {
    struct store *store = open_store();
    cr_assert_eq(save(store, 1, 100), 0);
    for (long n = 0; n < 2; n++) {
        mem_fail_after(n);
        cr_assert_eq(load(store, 501), ERR_NOMEM);
        mem_fail_after(-1);
    }
    cr_assert(stats_of(store).refused == 0 && files_with(".bad") == 0);
    cr_assert_eq(load(store, 501), 0);
    store_close(store);
}

/* ---- Bytes that come in pieces ---- */

/* Pieces are synced once for many pieces: a large file does not cost a sync for each. */
Test(store, pieces_are_synced_together) {
    enum { PIECE = 1 << 20 };
    static const char piece[PIECE];
    struct state_dir own;
    struct fault fault;
    size_t unsynced = 0;
    cr_assert_eq(state_dir_open(&own, dir, &fault), 0);
    int fd = state_dir_create(&own, 7);
    syncs = 0;
    for (int i = 0; i < 64; i++)
        cr_assert_eq(state_dir_append(&own, fd, piece, PIECE, &unsynced), 0);
    cr_assert(syncs > 0 && syncs <= 2, "%d", syncs);
    close(fd);
    state_dir_discard(&own, 7);
    cr_assert_eq(files_with(".part"), 0);
    state_dir_close(&own);
}

/* Lines that the log gets from a write that fails. */
static void write_beyond(const char *expected) {
    enum { SIZE = 1 << 20 };
    struct fault fault;
    struct state_dir own;
    static char data[SIZE], line[1024];
    char log[] = "/tmp/keepd-log-XXXXXX";
    int fd = mkstemp(log), before = dup(STDERR_FILENO);
    cr_assert_eq(state_dir_open(&own, dir, &fault), 0);
    dup2(fd, STDERR_FILENO);
    int rc = state_dir_write(&own, 7, data, SIZE);
    dup2(before, STDERR_FILENO);
    cr_expect_eq(rc, ERR_IO);
    cr_assert_gt(pread(fd, line, sizeof line - 1, 0), 0);
    cr_expect_not_null(strstr(line, "cannot be written: "), "%s", line);
    cr_expect_not_null(strstr(line, expected), "%s", line);
    cr_expect_eq(files_with(".state") + files_with(".tmp"), 0, "nothing stays");
    state_dir_close(&own);
    close(fd), close(before), unlink(log);
}

/* The log names the fault of the write, not that of a later call. */
Test(store, a_file_that_cannot_grow_is_named) {
    const struct rlimit limit = {64 << 10, 64 << 10};
    signal(SIGXFSZ, SIG_IGN);
    cr_assert_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
    write_beyond("File too large");
}

Test(store, a_full_disk_is_named) {
    if (mount("none", dir, "tmpfs", 0, "size=256k,mode=0700") != 0) {
        cr_skip_test("only root may make a small file system");
    }
    write_beyond("No space left on device");
    cr_assert_eq(umount2(dir, MNT_DETACH), 0);
}
