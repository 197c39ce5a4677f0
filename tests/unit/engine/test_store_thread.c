/* Tests the thread of engine/disk/store.c, and several stores of one directory. */
#include <criterion/criterion.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/disk/state_dir.h"
#include "engine/disk/store.h"
#include "engine/disk/store_move.h"
#include "tests/unit/engine/store_bed.h"

TestSuite(store_thread, .init = make_dir, .fini = remove_dir);

/* ---- The thread ---- */

static atomic_int wakes;

static void count_wake(void *arg) {
    (void)arg;
    atomic_fetch_add(&wakes, 1);
}

static int load_when_there(struct store *store, uint64_t id) {
    const struct state_view *view;
    int rc;
    while ((rc = store_load(store, id, &view)) == ERR_BUSY) usleep(1000);
    if (rc == 0) store_unload(store);
    return rc;
}

/* A slow check on the directory's thread; meanwhile a file is being read. */
static struct {
    atomic_bool reached, go;
    int rc;
} slow;

static int check_slowly(void *backend, struct state_view *view, struct fault *fault) {
    (void)backend, (void)view;
    atomic_store(&slow.reached, true);
    while (!atomic_load(&slow.go)) usleep(1000);
    return slow.rc != 0 ? fault_set(fault, slow.rc, "snapshot", "planned") : 0;
}

/* A store whose file 501 is being read, and is found to be `rc`. */
static struct store *open_reading(int rc) {
    struct store_options options = options_of();
    struct store *store = open_store();
    const struct state_view *view;
    struct fault fault;
    cr_assert_eq(save(store, 1, 100), 0);
    store_close(store);
    options.inline_io = false;
    options.check = check_slowly;
    options.done = count_wake;
    atomic_store(&slow.reached, false);
    atomic_store(&slow.go, false);
    slow.rc = rc;
    cr_assert_eq(store_open(&options, &store, &fault), 0);
    cr_assert_eq(store_load(store, 501, &view), ERR_BUSY);
    while (!atomic_load(&slow.reached)) usleep(1000);
    return store;
}

/* Nothing of a deleted conversation stays, even if its file turns out to be damaged. */
Test(store_thread, what_is_deleted_while_it_is_read_is_not_put_aside) {
    struct store *store = open_reading(ERR_MALFORMED);
    cr_assert_eq(store_remove(store, 501), 0);
    atomic_store(&slow.go, true);
    cr_assert_eq(load_when_there(store, 501), ERR_NOTFOUND);
    store_close(store);
    cr_assert(files_with(".bad") == 0 && files_with(".state") == 0);
}

/* If the requester has ended, the content is freed when it has been read, and read again for the
 * next. */
Test(store_thread, what_nobody_wants_any_more_is_not_kept) {
    struct store *store = open_reading(0);
    store_unload(store);
    atomic_store(&slow.go, true);
    while (store_loading(store, 501)) usleep(1000);
    cr_assert_eq(stats_of(store).read, 1);
    cr_assert_eq(load_when_there(store, 501), 0);
    cr_assert_eq(stats_of(store).read, 2, "it was kept");
    store_close(store);
}

/* Before that, a request for it is served. */
Test(store_thread, what_is_wanted_again_is_read_once) {
    struct store *store = open_reading(0);
    const struct state_view *view;
    store_unload(store);
    cr_assert_eq(store_load(store, 501, &view), ERR_BUSY);
    atomic_store(&slow.go, true);
    cr_assert_eq(load_when_there(store, 501), 0);
    cr_assert_eq(stats_of(store).read, 1);
    store_close(store);
}

/* A hanging disk is visible: a request waits and there is no progress. */
Test(store_thread, progress_stands_still_while_the_thread_does) {
    struct store *store = open_reading(0);
    uint64_t before = store_progress(store);
    cr_assert(before > 0 && store_loading(store, 501));
    cr_assert_eq(store_progress(store), before);
    atomic_store(&slow.go, true);
    cr_assert_eq(load_when_there(store, 501), 0);
    cr_assert_gt(store_progress(store), before);
    store_close(store);
}

/* With the store's own thread, everything handed over is on disk when store_close returns. */
Test(store_thread, with_its_thread) {
    struct store_options options = options_of();
    struct store *store;
    struct fault fault;
    struct state_head head;
    options.inline_io = false;
    options.done = count_wake;
    cr_assert_eq(store_open(&options, &store, &fault), 0);
    char *data = make_file(store, 1, 50, &head);
    store_save(store, &head, data, head.file_size);
    cr_assert_eq(find(store, 1, TOKENS, "space", 32, 0), 501, "what is being written counts");
    cr_assert_eq(load_when_there(store, 501), 0);
    cr_assert_geq(atomic_load(&wakes), 1);
    cr_assert_eq(store_remove(store, 501), 0);
    store_close(store);
    cr_assert_eq(files_with(".state"), 0, "a removal was lost");
}

/* ---- Several stores of one directory ---- */

/* How well each store's files serve a prompt of all tokens of conversation `seed` and one more. */
static void affinity(struct store *store, int seed, struct conversation_affinity *of) {
    int32_t prompt[TOKENS + 1];
    struct kv_params kv = kv_of(32);
    const uint8_t space[16] = "space";
    fill_tokens(prompt, seed, TOKENS);
    prompt[TOKENS] = 7;
    const struct conversation_query query = {
        .space = space, .kv = &kv, .prompt = prompt, .prompt_count = TOKENS + 1};
    struct conversation_search search = {.query = &query};
    memset(of, 0, STORES_MAX * sizeof *of);
    store_affinity(store, &search, of);
    conversation_search_close(&search);
}

/* A file that one store wrote cannot be found through any other. */
Test(store_thread, what_one_store_made_is_its_own) {
    struct conversation_affinity of[STORES_MAX];
    struct store *a = open_store(), *b = store_join(a, NULL, NULL);
    cr_assert_eq(save(a, 1, 100), 0);
    cr_assert_eq(save(b, 2, 100), 0);
    cr_assert_eq(find(a, 1, TOKENS, "space", 32, 0), 501);
    cr_assert_eq(find(b, 1, TOKENS, "space", 32, 0), 0);
    cr_assert_eq(find(b, 2, TOKENS, "space", 32, 0), 502);
    cr_assert_eq(store_remove(b, 501), ERR_NOTFOUND);
    cr_assert_eq(load(a, 501), 0);
    cr_assert_eq(load(b, 502), 0, "each reads for itself");
    affinity(b, 1, of);
    cr_assert(of[0].usable == TOKENS && of[1].usable == 0);
    affinity(a, 2, of);
    cr_assert(of[0].usable == 0 && of[1].usable == TOKENS);
    cr_assert(stats_of(a).files == 2 && stats_of(b).written == 2, "the directory's, for both");
    store_close(a); /* in any order */
    cr_assert_eq(find(b, 1, TOKENS, "space", 32, 0), 501, "nobody's again");
    cr_assert_eq(store_remove(b, 501), 0);
    store_close(b);
    cr_assert_eq(files_with(".state"), 1);
}

/* Sends the file of conversation 501 to the store again, as a client does. */
static void upload_again(struct store *store) {
    char data[4096];
    FILE *file = fopen(path_of("00000000000001f5.state"), "rb");
    size_t size = fread(data, 1, sizeof data, file);
    const uint8_t space[16] = "space";
    struct store_upload *upload;
    struct store_row row;
    struct fault fault = {0};
    fclose(file);
    cr_assert_eq(store_upload_open(store, space, &upload, &fault), 0);
    cr_assert_eq(store_upload_add(upload, data, size, &fault), 0, "%s", fault.text);
    cr_assert_eq(store_upload_end(upload, &row, &fault), 0, "%s", fault.text);
    cr_assert_eq(row.id, 501);
    store_upload_close(upload);
}

/* Begins an upload of a file of `room` bytes beside its head, and sends all of it but its seal. */
static struct store_upload *begin_upload(struct store *store, int seed, size_t room, int *rc,
                                         struct fault *fault) {
    struct state_head head;
    struct store_upload *upload;
    char *data = make_file(store, seed, room, &head);
    cr_assert_eq(store_upload_open(store, head.space, &upload, fault), 0);
    *rc = store_upload_add(upload, data, head.file_size - STATE_SEAL_BYTES, fault);
    mem_free(data);
    return upload;
}

/* Uploads that have not ended share a quarter of the directory's bytes, by what has come of them;
 * when they fail their bytes are free again. */
Test(store_thread, uploads_share_their_bytes) {
    struct store *store = open_store();
    size_t most = (size_t)store_upload_max(store), half = most / 2 - 2000;
    int rc;
    for (int round = 0; round < 3; round++) {
        struct store_upload *uploads[3];
        struct fault fault = {0};
        uploads[0] = begin_upload(store, 1, half, &rc, &fault);
        cr_assert_eq(rc, 0, "%s", fault.text);
        uploads[1] = begin_upload(store, 2, half, &rc, &fault);
        cr_assert_eq(rc, 0, "%s", fault.text);
        uploads[2] = begin_upload(store, 3, half, &rc, &fault);
        cr_assert_eq(rc, ERR_FULL);
        cr_assert_not_null(strstr(fault.text, "uploads that have not ended"));
        for (int i = 0; i < 3; i++) store_upload_close(uploads[i]);
        cr_assert_eq(files_with(".part"), 0);
    }
    store_close(store);
}

/* A head that promises a long file takes nothing from the others. */
Test(store_thread, an_upload_counts_what_has_come) {
    struct store *store = open_store();
    size_t most = (size_t)store_upload_max(store);
    struct state_head head;
    struct store_upload *trickle, *other;
    struct fault fault = {0};
    char *data = make_file(store, 1, most - 4000, &head);
    int rc;
    cr_assert_eq(store_upload_open(store, head.space, &trickle, &fault), 0);
    cr_assert_eq(store_upload_add(trickle, data, 2 * STATE_HEAD_BYTES, &fault), 0, "%s",
                 fault.text);
    other = begin_upload(store, 2, most - 8000, &rc, &fault);
    cr_assert_eq(rc, 0, "%s", fault.text);
    store_upload_close(other);
    store_upload_close(trickle);
    mem_free(data);
    store_close(store);
}

/* So it is never in the memory of two replicas. */
Test(store_thread, an_uploaded_copy_takes_no_file_from_its_owner) {
    struct store *a = open_store(), *b = store_join(a, NULL, NULL);
    cr_assert_eq(save(a, 1, 100), 0);
    upload_again(b);
    cr_assert_eq(find(b, 1, TOKENS, "space", 32, 0), 0);
    cr_assert_eq(store_remove(b, 501), ERR_NOTFOUND);
    cr_assert_eq(find(a, 1, TOKENS, "space", 32, 0), 501);
    cr_assert_eq(store_remove(a, 501), 0);
    store_close(b);
    store_close(a);
}

/* A file of an earlier process belongs to the store that finds it first. */
Test(store_thread, what_was_there_belongs_to_its_finder) {
    struct conversation_affinity of[STORES_MAX];
    struct store *a = open_store(), *b;
    for (int i = 1; i <= 3; i++) cr_assert_eq(save(a, i, 100), 0);
    store_close(a);
    a = open_store();
    b = store_join(a, NULL, NULL);
    affinity(a, 1, of);
    cr_assert(of[0].usable == 0 && of[1].usable == 0);
    cr_assert_eq(find(b, 1, TOKENS, "space", 32, 0), 501);
    cr_assert_eq(find(a, 1, TOKENS, "space", 32, 0), 0);
    affinity(a, 1, of);
    cr_assert(of[0].usable == 0 && of[1].usable == TOKENS);
    cr_assert_eq(store_remove(a, 502), 0, "nobody's: anybody's to delete");
    cr_assert_eq(find(b, 2, TOKENS, "space", 32, 0), 0);
    cr_assert_eq(find(a, 3, TOKENS, "space", 32, 0), 503);
    store_close(b);
    store_close(a);
}

struct writer {
    struct store *store;
    int first;
};

static atomic_int written;

/* Writes as a scheduler does, as fast as possible. */
static void *write_many(void *arg) {
    const struct writer *writer = arg;
    uint64_t id;
    for (int i = 0, rc = 0; i < 20; i++) {
        struct state_head head;
        char *data = make_file(writer->store, writer->first + i, 100, &head);
        store_save(writer->store, &head, data, head.file_size);
        while (!store_saved(writer->store, &id, &rc)) usleep(100);
        if (rc == 0 && id == head.id && load_when_there(writer->store, id) == 0)
            atomic_fetch_add(&written, 1);
    }
    return NULL;
}

/* With the thread: both stores at once, each gets its own files, and closing loses nothing. */
Test(store_thread, two_at_once) {
    struct store_options options = options_of();
    struct store *a;
    struct fault fault;
    pthread_t thread;
    options.inline_io = false;
    options.done = count_wake;
    cr_assert_eq(store_open(&options, &a, &fault), 0);
    struct writer one = {a, 100}, two = {store_join(a, count_wake, NULL), 200};
    cr_assert_eq(pthread_create(&thread, NULL, write_many, &two), 0);
    write_many(&one);
    cr_assert_eq(pthread_join(thread, NULL), 0);
    cr_assert_eq(atomic_load(&written), 40);
    for (int i = 0; i < 2; i++) {
        struct state_head head;
        struct store *store = i == 0 ? two.store : one.store;
        char *data = make_file(store, 300 + i, 100, &head);
        store_save(store, &head, data, head.file_size);
        store_close(store);
    }
    cr_assert_eq(files_with(".state"), 42);
}
