/* The file of what a fit has measured: read back, torn, of other texts, and locked. */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/mem.h"
#include "engine/fit_work.h"

enum { LAYERS = 2, HEADS = 3, D_MODEL = 5, ENTRIES = 4, TOKENS = 2 * WORTH_WINDOW };

static const struct worth_text most = {
    .layers = LAYERS, .heads = HEADS, .d_model = D_MODEL, .tokens = TOKENS, .entries = ENTRIES};
static char path[64];

static void name_path(void) {
    char dir[] = "/tmp/keepd-test-XXXXXX";
    cr_assert_not_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/work", dir);
}

static void remove_path(void) {
    unlink(path);
    *strrchr(path, '/') = '\0';
    rmdir(path);
}

TestSuite(fit_work, .init = name_path, .fini = remove_path);

static void key_of(int number, uint8_t key[SHA256_BYTES]) {
    memset(key, number, SHA256_BYTES);
}

/* A text whose numbers follow from `number`. */
static struct worth_text sample(int number) {
    struct worth_text t = most;
    const size_t inputs = LAYERS * ENTRIES * D_MODEL, worths = 2 * LAYERS * HEADS * ENTRIES;
    t.windows = TOKENS / WORTH_WINDOW;
    t.at = mem_must_alloc(ENTRIES, sizeof *t.at);
    t.x = mem_must_alloc(inputs, sizeof *t.x);
    t.worths = mem_must_alloc(worths, sizeof *t.worths);
    for (int i = 0; i < ENTRIES; i++) t.at[i] = 10 * i + number;
    for (size_t i = 0; i < inputs; i++) t.x[i] = (uint16_t)(i * 7 + (size_t)number);
    for (size_t i = 0; i < worths; i++) t.worths[i] = (float)i + (float)number;
    return t;
}

static bool keep(struct fit_work *work, int number) {
    struct worth_text text = sample(number);
    uint8_t key[SHA256_BYTES];
    key_of(number, key);
    const bool kept = fit_work_keep(work, key, &text);
    worth_text_close(&text);
    return kept;
}

static void expect_sample(const struct worth_text *text, int number) {
    struct worth_text wanted = sample(number);
    const size_t worths = 2 * LAYERS * HEADS * ENTRIES;
    cr_expect_eq(text->windows, 2);
    cr_expect_arr_eq(text->at, wanted.at, ENTRIES * sizeof *text->at);
    cr_expect_arr_eq(text->x, wanted.x, LAYERS * ENTRIES * D_MODEL * sizeof *text->x);
    cr_expect_arr_eq(text->worths, wanted.worths, worths * sizeof *text->worths);
    worth_text_close(&wanted);
}

static bool take(struct fit_work *work, int number) {
    struct worth_text text;
    uint8_t key[SHA256_BYTES];
    key_of(number, key);
    const bool taken = fit_work_take(work, key, &most, &text);
    if (taken) {
        expect_sample(&text, number);
        worth_text_close(&text);
    }
    return taken;
}

static struct fit_work open_work(void) {
    struct fit_work work;
    struct fault fault = {0};
    cr_assert_eq(fit_work_open(&work, path, false, NULL, NULL, &fault), 0, "%s", fault.text);
    return work;
}

/* Stands for the C library's: the disk of a test. */
static struct statvfs disk;
int fstatvfs(int fd, struct statvfs *out) {
    (void)fd;
    *out = disk;
    return 0;
}

/* The records take half of what would be free without them, so their own bytes do not change how
 * many texts a fit measures that goes on. */
Test(fit_work, the_room_is_half_of_the_free_disk) {
    struct fit_work work = open_work();
    disk = (struct statvfs){.f_frsize = 4096, .f_bavail = 1000};
    cr_assert_eq(fit_work_room(&work), 2048000);
    cr_assert_eq(ftruncate(work.fd, 500 * 4096), 0);
    disk.f_bavail -= 500;
    cr_assert_eq(fit_work_room(&work), 2048000);
    disk.f_bavail = 1 << 30;
    cr_assert_eq(fit_work_room(&work), FIT_WORK_BYTES);
    fit_work_close(&work, true);
}

/* Layers with different numbers of KV heads. */
Test(fit_work, the_heads_of_each_layer_are_those_of_the_model) {
    int32_t heads[LAYERS] = {HEADS, 1};
    struct worth_text text = sample(1), taken, differ = most;
    uint8_t key[SHA256_BYTES];
    struct fit_work work = open_work();
    const size_t worths = 2 * (HEADS + 1) * ENTRIES;
    key_of(1, key);
    differ.layer_heads = heads;
    text.layer_heads = heads;
    cr_assert(fit_work_keep(&work, key, &text));
    text.layer_heads = NULL;
    fit_work_close(&work, false);
    work = open_work();
    cr_assert(fit_work_take(&work, key, &differ, &taken));
    cr_assert_arr_eq(taken.layer_heads, heads, sizeof heads);
    cr_assert_eq(worth_text_stream(&taken, LAYERS), HEADS + 1);
    cr_assert_arr_eq(taken.worths, text.worths, worths * sizeof *text.worths);
    memset(taken.worths, 0, worths * sizeof *text.worths);
    cr_assert(fit_work_load(&work, 0, &taken));
    cr_assert_arr_eq(taken.worths, text.worths, worths * sizeof *text.worths);
    worth_text_close(&taken);
    worth_text_close(&text);
    fit_work_close(&work, true);
}

static void write_three(void) {
    struct fit_work work = open_work();
    cr_assert_not(take(&work, 1));
    for (int i = 1; i <= 3; i++) keep(&work, i);
    fit_work_close(&work, false);
}

Test(fit_work, texts_are_read_back_and_the_rest_is_added) {
    write_three();
    struct fit_work work = open_work();
    for (int i = 1; i <= 3; i++) cr_expect(take(&work, i));
    cr_expect_not(take(&work, 4));
    keep(&work, 4);
    fit_work_close(&work, false);
    work = open_work();
    for (int i = 1; i <= 4; i++) cr_expect(take(&work, i));
    fit_work_close(&work, true);
    cr_expect_neq(access(path, F_OK), 0);
}

/* Texts leave the memory when they are kept or taken, and are loaded in any order. */
Test(fit_work, texts_are_loaded_by_the_process_that_kept_or_took_them) {
    int64_t records[4];
    struct worth_text text = sample(0);
    struct fit_work work = open_work();
    cr_assert(keep(&work, 1) && keep(&work, 2));
    fit_work_close(&work, false);
    work = open_work();
    for (int i = 1; i <= 3; i++) {
        records[i] = work.end;
        cr_assert(i < 3 ? take(&work, i) : keep(&work, i));
    }
    for (int i = 3; i >= 1; i--) {
        cr_expect(fit_work_load(&work, records[i], &text));
        expect_sample(&text, i);
    }
    cr_expect_not(fit_work_load(&work, work.end, &text), "behind the last record");
    worth_text_close(&text);
    fit_work_close(&work, true);
}

Test(fit_work, has_room_for_records) {
    write_three();
    struct fit_work work = open_work();
    struct stat whole;
    cr_assert_eq(stat(path, &whole), 0);
    const size_t room = fit_work_room(&work);
    cr_expect(room >= (size_t)whole.st_size / 2 && room <= FIT_WORK_BYTES);
    fit_work_close(&work, true);
}

Test(fit_work, a_full_disk_keeps_what_was_kept_before) {
    struct stat whole;
    write_three();
    cr_assert_eq(stat(path, &whole), 0);
    const struct rlimit limit = {(rlim_t)whole.st_size / 2, (rlim_t)whole.st_size / 2};
    cr_assert_eq(unlink(path), 0);
    signal(SIGXFSZ, SIG_IGN);
    cr_assert_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
    struct fit_work work = open_work();
    cr_expect(keep(&work, 1));
    cr_expect_not(keep(&work, 2));
    cr_expect_not(keep(&work, 3));
    fit_work_close(&work, false);
    work = open_work();
    cr_expect(take(&work, 1));
    cr_expect_not(take(&work, 2));
    fit_work_close(&work, true);
}

/* Other texts, or other settings: from the first difference on everything is measured again. */
Test(fit_work, another_key_ends_the_file) {
    write_three();
    struct fit_work work = open_work();
    cr_expect(take(&work, 1));
    cr_expect_not(take(&work, 7));
    keep(&work, 7);
    cr_expect_not(take(&work, 3));
    keep(&work, 3);
    fit_work_close(&work, false);
    work = open_work();
    cr_expect(take(&work, 1) && take(&work, 7) && take(&work, 3));
    fit_work_close(&work, true);
}

/* Killed at any time, on a disk that is full or damaged. */
Test(fit_work, torn_and_damaged_records_are_measured_again) {
    struct stat whole;
    write_three();
    cr_assert_eq(stat(path, &whole), 0);
    const off_t record = whole.st_size / 3;
    for (off_t size = record + 1; size < 2 * record; size += 37) {
        cr_assert_eq(truncate(path, size), 0);
        struct fit_work work = open_work();
        cr_expect(take(&work, 1));
        cr_expect_not(take(&work, 2));
        keep(&work, 2);
        keep(&work, 3);
        fit_work_close(&work, false);
    }
    for (off_t at = 0; at < record; at += 11) {
        FILE *file = fopen(path, "r+b");
        cr_assert(file && fseek(file, record + at, SEEK_SET) == 0);
        const int byte = fgetc(file);
        cr_assert(fseek(file, record + at, SEEK_SET) == 0 && fputc(byte ^ 16, file) != EOF);
        fclose(file);
        struct fit_work work = open_work();
        cr_expect(take(&work, 1));
        cr_expect_not(take(&work, 2), "byte %ld", (long)at);
        keep(&work, 2);
        keep(&work, 3);
        fit_work_close(&work, false);
    }
}

Test(fit_work, one_process_at_a_time) {
    struct fit_work work = open_work(), other;
    struct fault fault = {0};
    cr_expect_eq(fit_work_open(&other, path, false, NULL, NULL, &fault), ERR_BUSY);
    cr_expect_eq(other.fd, -1);
    fit_work_close(&work, false);
    work = open_work();
    fit_work_close(&work, true);
}

static void tell(void *arg) {
    cr_assert_eq(write(*(int *)arg, "w", 1), 1);
}

/* The one that waits gets a file that is there, not the one that was removed under it. */
Test(fit_work, who_waits_goes_on_when_the_other_is_done) {
    struct fit_work work = open_work();
    int ends[2], status;
    char byte;
    cr_assert_eq(pipe(ends), 0);
    const pid_t pid = fork();
    if (pid == 0) {
        struct fit_work own;
        struct fault fault;
        fit_work_close(&(struct fit_work){.fd = work.fd}, false);
        int rc = fit_work_open(&own, path, true, tell, &ends[1], &fault);
        _exit(rc != 0 || access(path, F_OK) != 0);
    }
    cr_assert_eq(read(ends[0], &byte, 1), 1);
    fit_work_close(&work, true);
    cr_assert_eq(waitpid(pid, &status, 0), pid);
    cr_expect_eq(status, 0);
}

Test(fit_work, without_a_file_nothing_is_kept) {
    struct fit_work work;
    struct fault fault = {0};
    cr_expect_eq(fit_work_open(&work, "/nowhere/work", true, NULL, NULL, &fault), ERR_IO);
    cr_expect_not_null(strstr(fault.text, "/nowhere/work"));
    cr_expect_not(take(&work, 1));
    cr_expect_not(keep(&work, 1));
    fit_work_close(&work, true);
}
