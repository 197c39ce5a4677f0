#include "engine/steps/constraint.h"

#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/check.h"
#include "base/mem.h"
#include "base/utf8.h"

/* ---- The table ---- */

void constraint_table_open(struct constraint_table *table,
                           const struct constrain_vocabulary *vocabulary) {
    *table =
        (struct constraint_table){.vocabulary = *vocabulary, .budget.limit = CONSTRAIN_MEMORY_MAX};
    CHECK(pthread_mutex_init(&table->lock, NULL) == 0);
    CHECK(mask_thread_open(&table->masks) == 0);
}

void constraint_table_stop(struct constraint_table *table) {
    mask_thread_stop(&table->masks);
}

static void free_constraint(struct engine_constraint *constraint) {
    constrain_close(constraint->language);
    mem_free(constraint);
}

void constraint_table_close(struct constraint_table *table) {
    struct engine_constraint *next;
    mask_thread_close(&table->masks);
    for (struct engine_constraint *c = table->first; c != NULL; c = next) {
        next = c->next;
        CHECK(c->users == 0);
        free_constraint(c);
    }
    constrain_tokens_close(table->tokens);
    pthread_mutex_destroy(&table->lock);
    *table = (struct constraint_table){0};
}

static bool is_newlines(const char *bytes, size_t size) {
    return size > 0 && size <= CONSTRAINT_NEWLINE_BYTES && bytes[0] == '\n' &&
           bytes[size - 1] == '\n';
}

/* Builds the trie of the vocabulary once. The caller has the lock. */
static int open_tokens(struct constraint_table *table) {
    const struct constrain_vocabulary *v = &table->vocabulary;
    if (table->tokens != NULL) return 0;
    table->newline_count = 0;
    for (int32_t id = 0; id < v->size && table->newline_count < CONSTRAINT_NEWLINES; id++) {
        const char *bytes = NULL;
        size_t size = v->token_bytes(v->arg, id, &bytes);
        if (is_newlines(bytes, size)) table->newlines[table->newline_count++] = id;
    }
    return constrain_tokens_open(v, &table->tokens);
}

/* Finds a constraint and counts one user more. The caller has the lock. */
static struct engine_constraint *find_compiled(struct constraint_table *table,
                                               const uint8_t key[SHA256_BYTES]) {
    for (struct engine_constraint **at = &table->first; *at != NULL; at = &(*at)->next) {
        struct engine_constraint *found = *at;
        if (memcmp(found->key, key, SHA256_BYTES) != 0) continue;
        *at = found->next;
        found->next = table->first;
        table->first = found;
        if (found->users++ == 0) table->idle--;
        return found;
    }
    return NULL;
}

static int digest_language(const struct constrain_part *part, uint8_t key[SHA256_BYTES]) {
    struct buf text;
    buf_open(&text, CONSTRAINT_TEXT_BYTES);
    constrain_part_write(part, &text);
    bool failed = text.failed;
    if (!failed) sha256(text.data, text.size, key);
    buf_close(&text);
    return failed ? ERR_NOMEM : 0;
}

/* Several threads may compile one language at once; the first to finish stays. */
static struct engine_constraint *add(struct constraint_table *table, const uint8_t *key,
                                     struct constrain *language) {
    pthread_mutex_lock(&table->lock);
    struct engine_constraint *c = find_compiled(table, key);
    if (c != NULL) {
        constrain_close(language);
    } else if ((c = mem_try_alloc(1, sizeof *c)) != NULL) {
        *c = (struct engine_constraint){
            .language = language, .table = table, .users = 1, .next = table->first};
        memcpy(c->key, key, SHA256_BYTES);
        table->first = c;
    } else {
        constrain_close(language);
    }
    pthread_mutex_unlock(&table->lock);
    return c;
}

/* Drops the constraint without users that was used least recently. The caller has the lock. */
static void drop_unused_language(struct constraint_table *table) {
    struct engine_constraint **oldest = NULL;
    for (struct engine_constraint **at = &table->first; *at != NULL; at = &(*at)->next)
        if ((*at)->users == 0) oldest = at;
    CHECK(oldest != NULL);
    struct engine_constraint *gone = *oldest;
    *oldest = gone->next;
    table->idle--;
    free_constraint(gone);
}

/* Compiles a language. Constraints without users are dropped when it finds no room. */
static int compile_language(struct constraint_table *table, const struct constrain_part *part,
                            struct constrain **language, struct fault *fault) {
    int rc;
    bool dropped = true;
    while ((rc = constrain_open(part, table->tokens, &table->budget, language, fault)) ==
               ERR_FULL &&
           dropped) {
        pthread_mutex_lock(&table->lock);
        dropped = table->idle > 0;
        if (dropped) drop_unused_language(table);
        pthread_mutex_unlock(&table->lock);
    }
    return rc;
}

struct compilation {
    struct constraint_table *table;
    const struct constrain_part *part;
    struct constrain *language;
    struct fault *fault;
    int rc;
};

static void *compile_apart(void *arg) {
    struct compilation *c = arg;
    /* Where it is not permitted, the thread works at the usual priority. */
    (void)setpriority(PRIO_PROCESS, (id_t)gettid(), CONSTRAINT_NICE);
    c->rc = compile_language(c->table, c->part, &c->language, c->fault);
    return NULL;
}

/* Compiles in a thread for this language alone: a thread cannot raise its priority again. */
static void compile_at_low_priority(struct compilation *c) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, compile_apart, c) == 0)
        CHECK(pthread_join(thread, NULL) == 0);
    else
        c->rc = compile_language(c->table, c->part, &c->language, c->fault);
}

int constraint_open(struct constraint_table *table, const struct constrain_part *part,
                    struct engine_constraint **out, struct fault *fault) {
    struct compilation compilation = {.table = table, .part = part, .fault = fault};
    uint8_t key[SHA256_BYTES];
    *out = NULL;
    int rc = digest_language(part, key);
    pthread_mutex_lock(&table->lock);
    if (rc == 0) rc = open_tokens(table);
    if (rc == 0) *out = find_compiled(table, key);
    bool wanted = rc == 0 && *out == NULL, busy = table->compiling >= CONSTRAINTS_AT_ONCE;
    if (wanted && !busy) table->compiling++;
    pthread_mutex_unlock(&table->lock);
    if (rc != 0) return fault_set(fault, rc, part->field, "%s", err_text(rc));
    if (!wanted) return 0;
    if (busy) return ERR_BUSY;
    compile_at_low_priority(&compilation);
    pthread_mutex_lock(&table->lock);
    table->compiling--;
    pthread_mutex_unlock(&table->lock);
    if (compilation.rc != 0) return compilation.rc;
    *out = add(table, key, compilation.language);
    return *out != NULL ? 0 : fault_set(fault, ERR_NOMEM, part->field, "%s", err_text(ERR_NOMEM));
}

void constraint_close(struct constraint_table *table, struct engine_constraint *constraint) {
    if (constraint == NULL) return;
    pthread_mutex_lock(&table->lock);
    CHECK(constraint->users > 0);
    if (--constraint->users == 0 && ++table->idle > CONSTRAINTS_KEPT) drop_unused_language(table);
    pthread_mutex_unlock(&table->lock);
}

/* ---- One answer ---- */

static struct constraint_table *languages_of(const struct engine_request *request) {
    return request->constraint->table;
}

int32_t constraint_last_word(const struct engine_request *request,
                             size_t (*token_bytes)(const void *arg, int32_t id, const char **bytes),
                             const void *arg) {
    int32_t last = request->prompt_count - 1;
    for (; last > 0; last--) {
        const char *bytes = "";
        size_t size = token_bytes(arg, request->prompt[last], &bytes), blank = 0;
        while (blank < size && utf8_is_blank(bytes[blank])) blank++;
        if (size == 0 || blank < size) break;
    }
    return request->prompt[last];
}

/* The prompt may have opened the reasoning, or closed it. */
static enum constraint_phase first_phase(const struct engine_request *request) {
    if (request->think_begin < 0) return CONSTRAINT_ON;
    const struct constrain_vocabulary *vocabulary = &languages_of(request)->vocabulary;
    int32_t last = constraint_last_word(request, vocabulary->token_bytes, vocabulary->arg);
    if (last == request->think_begin) return CONSTRAINT_THINKING;
    return last == request->think_end ? CONSTRAINT_AFTER : CONSTRAINT_BEGIN;
}

int constraint_run_open(struct constraint_run *run, const struct engine_request *request) {
    *run = (struct constraint_run){0};
    if (request->constraint == NULL) return 0;
    size_t words = constrain_mask_words(languages_of(request)->vocabulary.size);
    run->mask = mem_try_alloc(words, sizeof *run->mask);
    if (run->mask == NULL) return ERR_NOMEM;
    run->phase = first_phase(request);
    run->waits = constraint_masks(run) && request->max_tokens > 0;
    return 0;
}

void constraint_run_close(struct constraint_run *run, const struct engine_request *request) {
    if (run->task != NULL) mask_task_drop(&languages_of(request)->masks, run->task);
    mem_free(run->mask);
    *run = (struct constraint_run){0};
}

static void permit_tokens(struct constraint_run *run, const struct constraint_table *table,
                          const int32_t *ids, int count) {
    for (int i = 0; i < count; i++)
        if (ids[i] >= 0 && ids[i] < table->vocabulary.size)
            run->mask[ids[i] / 32] |= 1u << (ids[i] % 32);
}

static bool constraint_is_empty(const struct constraint_run *run,
                                const struct constraint_table *table) {
    uint32_t any = 0;
    for (size_t i = 0; i < constrain_mask_words(table->vocabulary.size); i++) any |= run->mask[i];
    return any == 0;
}

void constraint_note(struct constraint_run *run, const struct engine_request *request,
                     int32_t token, const char *text, size_t old_size, size_t size) {
    run->grown = false;
    if (run->phase == CONSTRAINT_NONE) return;
    if (run->phase == CONSTRAINT_BEGIN && token == request->think_begin) {
        run->phase = CONSTRAINT_THINKING;
    } else if (run->phase == CONSTRAINT_THINKING) {
        if (token == request->think_end) run->phase = CONSTRAINT_AFTER;
        run->begin = (uint32_t)size;
    } else if (run->phase == CONSTRAINT_AFTER && run->skipped < CONSTRAINT_NEWLINE_BYTES &&
               is_newlines(text + old_size, size - old_size)) {
        /* Line breaks behind the reasoning are not part of the answer. */
        run->begin = (uint32_t)size;
        if (++run->skipped == CONSTRAINT_NEWLINE_BYTES) run->phase = CONSTRAINT_ON;
    } else {
        run->phase = CONSTRAINT_ON;
        run->grown = true;
    }
    run->waits = constraint_masks(run);
}

/* ---- Masks ---- */

static void release_constraint(void *arg) {
    struct engine_constraint *constraint = arg;
    constraint_close(constraint->table, constraint);
}

static int post_task(struct constraint_run *run, const struct engine_request *request,
                     const struct constraint_text *text) {
    struct constraint_table *table = languages_of(request);
    size_t words = text->last ? 0 : constrain_mask_words(table->vocabulary.size);
    struct mask_task *task =
        mask_task_open(&run->at, text->text + run->begin, text->size - run->begin, words);
    if (task == NULL) return ERR_NOMEM;
    pthread_mutex_lock(&table->lock);
    task->release_arg = find_compiled(table, request->constraint->key); /* one user more */
    pthread_mutex_unlock(&table->lock);
    task->release = release_constraint;
    task->language = request->constraint->language;
    task->wake = text->wake;
    int rc = mask_thread_post(&table->masks, task);
    if (rc != 0) {
        mask_task_drop(&table->masks, task);
        return rc;
    }
    run->task = task;
    return ERR_BUSY;
}

/* Collects the result of the mask thread. ERR_BUSY: there is none yet. */
static int collect_task(struct constraint_run *run, const struct engine_request *request,
                        struct constrain_next *next) {
    struct mask_task *task = run->task;
    if (!mask_task_done(task)) return ERR_BUSY;
    int rc = task->rc;
    *next = task->next;
    run->at = task->at;
    run->costly = task->slice > 2 * (uint64_t)MASK_SLICE_WORK; /* more than one slice */
    if (task->mask != NULL)
        memcpy(run->mask, task->mask,
               constrain_mask_words(languages_of(request)->vocabulary.size) * sizeof *run->mask);
    mask_task_drop(&languages_of(request)->masks, task);
    run->task = NULL;
    return rc;
}

/* Tries here first, and leaves to the thread what costs too much. */
static int find_next(struct constraint_run *run, const struct engine_request *request,
                     const struct constraint_text *text, struct constraint_work *work,
                     struct constrain_next *next) {
    if (run->task != NULL) return collect_task(run, request, next);
    uint64_t most = run->costly ? CONSTRAINT_KNOWN_WORK : CONSTRAINT_ANSWER_WORK;
    struct constrain_effort effort = {.work = most < work->left ? most : work->left};
    int rc = constrain_next_within(request->constraint->language, &run->at, text->text + run->begin,
                                   text->size - run->begin, text->last ? NULL : run->mask, next,
                                   &effort);
    work->left -= effort.work < work->left ? effort.work : work->left;
    work->spent += effort.work;
    if (rc == ERR_BUSY) return post_task(run, request, text);
    run->costly = false;
    return rc;
}

int constraint_fill(struct constraint_run *run, const struct engine_request *request,
                    const struct constraint_text *text, struct constraint_work *work, bool *whole) {
    const struct constraint_table *table = languages_of(request);
    struct constrain_next next = {0};
    int rc = find_next(run, request, text, work, &next);
    *whole = false;
    if (rc != 0) return rc;
    run->waits = false;
    *whole = run->grown && next.accepts && !next.continues;
    if (*whole || text->last) return 0;
    if (run->phase == CONSTRAINT_BEGIN) permit_tokens(run, table, &request->think_begin, 1);
    if (run->phase == CONSTRAINT_AFTER)
        permit_tokens(run, table, table->newlines, table->newline_count);
    for (int i = 0; i < text->end_count; i++) /* no end before the text is whole */
        if (text->ends[i] >= 0 && text->ends[i] < table->vocabulary.size)
            run->mask[text->ends[i] / 32] &= ~(1u << (text->ends[i] % 32));
    if (next.accepts && (!text->hold || constraint_is_empty(run, table)))
        permit_tokens(run, table, text->ends, text->end_count);
    return constraint_is_empty(run, table) ? ERR_INVALID : 0;
}

size_t constraint_foresee(const struct constraint_run *run, const struct engine_request *request,
                          const char *text, size_t size, char *out, size_t most,
                          struct constraint_work *work) {
    if (run->phase != CONSTRAINT_ON || run->waits || run->task != NULL || work->left == 0) return 0;
    struct constrain_effort effort = {.work = work->left};
    size_t found = constrain_foresee(request->constraint->language, &run->at, text + run->begin,
                                     size - run->begin, out, most, &effort);
    work->left -= effort.work < work->left ? effort.work : work->left;
    work->spent += effort.work;
    return found;
}
