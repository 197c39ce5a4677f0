/* The calls of an opened engine, which connect the server with the replicas: jobs go in through
 * bounded queues, and the replicas' statuses come out and are summed here.
 *
 * open.c opens the engine; replica.c has the thread, sched.c the decisions, model.c the
 * computation, text.c the text. */
#include "engine/engine.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/mem.h"
#include "engine/disk/store.h"
#include "engine/encoder.h"
#include "engine/engine_int.h"
#include "engine/engine_pictures.h"
#include "engine/engine_text.h"

#define SHOWN_BYTES_MAX ((size_t)1 << 20) /* memory for the tokens of a tag */

/* ---- Running ---- */

int engine_start(struct engine *e) {
    for (int i = 0; i < e->replica_count; i++) {
        int rc = replica_start(&e->replicas[i]);
        if (rc != 0) return rc;
    }
    return 0;
}

void engine_drain(struct engine *e) {
    atomic_store(&e->common.draining, true);
    for (int i = 0; i < e->replica_count; i++) replica_signal(&e->replicas[i]);
}

bool engine_idle(struct engine *e) {
    for (int i = 0; i < e->replica_count; i++)
        if (!replica_idle(&e->replicas[i])) return false;
    return true;
}

void engine_close(struct engine *e) {
    if (!e) return;
    atomic_store(&e->common.draining, true);
    atomic_store(&e->common.stopping, true);
    for (int i = 0; i < e->replica_count; i++) replica_signal(&e->replicas[i]);
    for (int i = 0; i < e->replica_count; i++) replica_stop(&e->replicas[i]);
    if (e->constraints.vocabulary.token_bytes) constraint_table_stop(&e->constraints);
    for (int i = e->replica_count - 1; i >= 0; i--) replica_close(&e->replicas[i]);
    if (e->constraints.vocabulary.token_bytes) constraint_table_close(&e->constraints);
    adapters_close(&e->adapters);
    text_close(&e->text);
    mem_free(e->layer_heads);
    mem_free(e->prompts);
    mem_free(e->replicas);
    mem_free(e->model_dir);
    mem_free(e->draft_path);
    mem_free(e);
}

/* ---- Requests ---- */

const struct engine_info *engine_info(const struct engine *e) {
    return &e->info;
}

const char *engine_policy_at(const struct engine *e, int index) {
    const struct policy *policy = sched_policy_at(&e->replicas[0].sched.options.kv, index);
    return policy ? policy->name : NULL;
}

/* There are max_queue places for each replica, so at least one replica has room for every place
 * taken. */
bool engine_queue_enter(struct engine *e, int jobs) {
    int64_t places = (int64_t)e->options.max_queue * e->replica_count - e->entered;
    for (int i = 0; i < e->replica_count; i++) places -= atomic_load(&e->replicas[i].waiting);
    if (jobs > places) return false;
    e->entered += jobs;
    return true;
}

void engine_queue_leave(struct engine *e, int jobs) {
    e->entered -= jobs;
}

void engine_picture_ids(const struct engine *e, const struct picture *picture,
                        const struct picture_rows *rows, int32_t *ids) {
    CHECK(e->info.pictures);
    encoder_write_ids(e->replicas[0].encoder.vision, picture, rows, ids);
}

static int refuse_picture_rows(struct fault *fault, const char *what) {
    return fault_set(fault, ERR_INVALID, "prompt", "rows of a picture %s", what);
}

/* Checks rows of one tile, which begin behind row `behind` of the prompt. */
static int check_tile(const struct engine *e, const struct engine_request *r,
                      const struct picture_rows *rows, size_t behind, struct fault *fault) {
    if (rows->picture < 0 || rows->picture >= r->picture_count)
        return refuse_picture_rows(fault, "that is not there");
    const struct picture *picture = r->pictures[rows->picture];
    const int run = picture_run(e->info.pictures->kind, picture);
    const size_t count = (size_t)run;
    if (rows->tile < 0 || rows->tile >= picture->tiles || rows->count != run || rows->first < 0 ||
        rows->first % run || rows->first >= picture->tile_tokens ||
        !picture_is_of_form(picture, e->info.pictures))
        return refuse_picture_rows(fault, "that is made for another model");
    if (rows->at < behind || rows->at + count > (size_t)r->prompt_count)
        return refuse_picture_rows(fault, "lie outside of the prompt or over each other");
    int32_t *ids = mem_try_alloc(count, sizeof *ids);
    if (!ids) return ERR_NOMEM;
    encoder_write_ids(e->replicas[0].encoder.vision, picture, rows, ids);
    const bool equal = memcmp(ids, r->prompt + rows->at, count * sizeof *ids) == 0;
    mem_free(ids);
    return equal ? 0 : refuse_picture_rows(fault, "have other ids");
}

/* The rows that show pictures have the ids of these pictures. */
static int check_pictures(const struct engine *e, const struct engine_request *r,
                          struct fault *fault) {
    if (r->picture_row_count == 0) return 0;
    if (!e->info.pictures)
        return fault_set(fault, ERR_UNSUPPORTED, "messages", "this model takes no pictures");
    if (r->pooling) return fault_set(fault, ERR_UNSUPPORTED, "input", "not with pictures");
    size_t behind = 0;
    int rc = 0;
    for (int i = 0; i < r->picture_row_count && rc == 0; i++) {
        rc = check_tile(e, r, &r->picture_rows[i], behind, fault);
        behind = r->picture_rows[i].at + (size_t)r->picture_rows[i].count;
    }
    return rc;
}

static int check_token_ids(const struct engine *e, const struct engine_request *r,
                           struct fault *fault) {
    int32_t vocab = e->info.vocab;
    const struct picture_rows *rows = r->picture_rows, *end = rows + r->picture_row_count;
    for (int32_t i = 0; i < r->prompt_count; i++)
        if (rows < end && (size_t)i == rows->at) {
            i += rows++->count - 1;
        } else if (r->prompt[i] < 0 || r->prompt[i] >= vocab)
            return fault_set(fault, ERR_INVALID, "prompt",
                             "token id %d at index %d is not in the vocabulary (0..%d)",
                             r->prompt[i], i, vocab - 1);
    for (int32_t i = 0; i < r->bias_count; i++)
        if (r->bias[i].token < 0 || r->bias[i].token >= vocab)
            return fault_set(fault, ERR_INVALID, "logit_bias",
                             "token id %d is not in the vocabulary", r->bias[i].token);
    for (int32_t i = 0; i < r->judged_count; i++)
        if (r->judged[i] < 0 || r->judged[i] >= vocab)
            return fault_set(fault, ERR_INVALID, "", "a judged token is not in the vocabulary");
    for (int32_t i = 0; i < r->stop_id_count; i++)
        if (r->stop_ids[i] < 0 || r->stop_ids[i] >= vocab)
            return fault_set(fault, ERR_INVALID, "stop_token_ids",
                             "token id %d is not in the vocabulary", r->stop_ids[i]);
    return 0;
}

static int check_counts(const struct engine *e, const struct engine_request *r,
                        struct fault *fault) {
    if (r->prompt_count < 1)
        return fault_set(fault, ERR_INVALID, "prompt", "the prompt has no tokens");
    if (r->max_tokens < 0) return fault_set(fault, ERR_INVALID, "max_tokens", "must be at least 0");
    if (r->choices < 0) return fault_set(fault, ERR_INVALID, "n", "must be at least 1");
    if (r->choices > e->info.max_choices)
        return fault_set(fault, ERR_LIMIT, "n", "n is %d, this server allows %d", r->choices,
                         e->info.max_choices);
    int most = e->info.max_logprobs;
    if (r->top_logprobs < -1 || r->top_logprobs > most)
        return fault_set(fault, ERR_INVALID, "top_logprobs", "must be at most %d", most);
    if (r->prompt_top_logprobs < 0 || r->prompt_top_logprobs > most)
        return fault_set(fault, ERR_INVALID, "prompt_logprobs", "must be 0 to %d", most);
    return 0;
}

static int longest_of(const struct engine *e, bool shifts) {
    return shifts ? ENGINE_SHIFTED_TOKENS : e->info.max_model_len;
}

int engine_longest(const struct engine *e, const struct engine_kv *kv) {
    const struct sched_kv *rules = &e->replicas[0].sched.options.kv;
    struct kv_params params;
    struct fault ignored = {0};
    int rc = sched_resolve_kv(kv, rules, &params, &ignored);
    /* Settings that do not resolve are refused by their field, not for the prompt's length. */
    bool shifts = rc == 0 ? params.places > 0
                          : kv->overflow == ENGINE_OVERFLOW_SHIFT ||
                                (kv->overflow != ENGINE_OVERFLOW_ERROR && rules->shifts);
    return longest_of(e, shifts);
}

int engine_check(const struct engine *e, struct engine_job *job, struct fault *fault) {
    const struct engine_request *r = &job->request;
    const struct sched_options *options = &e->replicas[0].sched.options;
    int rc = check_counts(e, r, fault);
    if (rc == 0) rc = sched_resolve_job(&options->kv, job, fault);
    if (rc != 0) return rc;
    int longest = longest_of(e, job->params->places > 0);
    if ((int64_t)r->prompt_count + r->max_tokens > longest || r->max_tokens > e->info.max_model_len)
        return fault_set(
            fault, ERR_CONTEXT, "prompt",
            "maximum context length is %d tokens; the prompt has %d and %d were asked for "
            "(kv.overflow \"shift\" lets texts with a budget go on)",
            longest, r->prompt_count, r->max_tokens);
    rc = check_pictures(e, r, fault);
    if (rc == 0) rc = check_token_ids(e, r, fault);
    if (rc == 0) rc = sched_check(options, job, fault);
    return rc;
}

/* ---- Replicas ---- */

/* Considers only conversations that exist now: a conversation whose turn is still running cannot be
 * continued yet, whatever hint the client sends. */
static void find_affinity(struct engine *e, const struct engine_job *job,
                          struct conversation_affinity *of) {
    struct conversation_query query;
    struct conversation_search search = {.query = &query};
    if (!sched_query(job, &query)) return;
    for (int i = 0; i < e->replica_count; i++) replica_affinity(&e->replicas[i], &search, &of[i]);
    if (e->replicas[0].store) store_affinity(e->replicas[0].store, &search, of);
    conversation_search_close(&search);
}

/* Compares replicas by room, then by usable tokens of a conversation, then by the client's session
 * hint, then by load. */
static bool suits_better(const struct engine *e, const struct conversation_affinity *of, int a,
                         int b) {
    bool room = replica_has_capacity(&e->replicas[a]);
    if (room != replica_has_capacity(&e->replicas[b])) return room;
    if (of[a].usable != of[b].usable) return of[a].usable > of[b].usable;
    if (of[a].hinted != of[b].hinted) return of[a].hinted;
    return atomic_load(&e->replicas[a].tokens) < atomic_load(&e->replicas[b].tokens);
}

static struct replica *choose_replica(struct engine *e, const struct engine_job *job) {
    struct conversation_affinity of[ENGINE_REPLICAS_MAX] = {0};
    int best = 0;
    if (e->replica_count > 1) find_affinity(e, job, of);
    for (int i = 1; i < e->replica_count; i++)
        if (suits_better(e, of, i, best)) best = i;
    return &e->replicas[best];
}

int engine_submit(struct engine *e, struct engine_job *job) {
    if (atomic_load(&e->common.draining)) return ERR_STOPPED;
    const struct sched_options *options = &e->replicas[0].sched.options;
    CHECK(job->params); /* engine_check has resolved them */
    int rc = seq_job_alloc(job, options->text.token_bytes_max, reserve_all_streams(&options->shape),
                           e->info.width, options->end_vector ? options->width : 0);
    if (rc != 0) return rc;
    job->queued_ns = clock_ns();
    e->entered--;
    replica_submit(choose_replica(e, job), job);
    return 0;
}

int engine_conversation_order(struct engine *e, struct engine_order *order) {
    atomic_store(&order->done, 0);
    for (int i = 0; i < e->replica_count; i++)
        if (!replica_runs(&e->replicas[i])) return ERR_STOPPED;
    if (atomic_load(&e->common.orders) == ENGINE_ORDERS_MAX) return ERR_FULL;
    atomic_fetch_add(&e->common.orders, 1);
    atomic_store(&order->replicas_left, e->replica_count);
    atomic_store(&order->code, ERR_NOTFOUND);
    for (int i = 0; i < e->replica_count; i++) replica_order(&e->replicas[i], order);
    return 0;
}

/* ---- Text ---- */

int engine_tokenize(const struct engine *e, const char *text, size_t size, bool add_special,
                    bool parse_special, struct arena *arena, struct engine_ids *out,
                    struct fault *fault) {
    unsigned flags = (add_special ? TOK_TEMPLATE : 0) | (parse_special ? TOK_SPECIALS : 0);
    struct tok_ids ids = {0};
    /* Bounds the work of /tokenize, which may ask for more tokens than a prompt can have. */
    size_t longest = (size_t)e->info.max_model_len;
    size_t most = (longest > ENGINE_SHIFTED_TOKENS ? longest : ENGINE_SHIFTED_TOKENS) * 4 + 65536;
    int rc = tok_encode(e->text.tok, text, size, flags, NULL, 0, most, arena, &ids, fault);
    *out = (struct engine_ids){.ids = ids.ids, .count = ids.count};
    return rc;
}

int engine_tokenize_pair(const struct engine *e, const char *first, const char *second, size_t most,
                         struct arena *arena, struct engine_ids *out, struct fault *fault) {
    const struct tok_pair pair = {{first, second}, {strlen(first), strlen(second)}};
    const size_t after = (size_t)engine_added_after(e);
    const size_t longest = (size_t)e->info.max_model_len * 4 + 65536;
    struct tok_ids ids = {0};
    size_t at = 0;
    int rc = tok_encode_pair(e->text.tok, &pair, longest, arena, &ids, &at, fault);
    if (rc == 0 && most > 0 && ids.count > most && most > at + after) {
        memmove(ids.ids + (most - after), ids.ids + (ids.count - after), after * sizeof *ids.ids);
        ids.count = most;
    }
    *out = (struct engine_ids){.ids = ids.ids, .count = ids.count, .second = at};
    return rc;
}

int engine_render_chat(const struct engine *e, const struct engine_chat *chat, struct arena *arena,
                       struct engine_ids *out, struct fault *fault) {
    struct text_pictures pictures = {.pictures = chat->pictures, .count = chat->picture_count};
    struct tok_ids ids = {0};
    if (chat->picture_count) pictures.kind = e->info.pictures->kind;
    int rc = text_render_chat(&e->text, chat->context, chat->picture_count ? &pictures : NULL,
                              (size_t)chat->longest, arena, &ids, fault);
    *out = (struct engine_ids){.ids = ids.ids,
                               .count = ids.count,
                               .picture_rows = pictures.rows,
                               .picture_row_count = rc ? 0 : pictures.row_count};
    for (int i = 0; i < out->picture_row_count; i++) {
        const struct picture_rows *rows = &out->picture_rows[i];
        engine_picture_ids(e, chat->pictures[rows->picture], rows, out->ids + rows->at);
    }
    return rc;
}

int engine_render_template(const char *source, const cJSON *context, struct arena *arena,
                           const char **out, struct fault *fault) {
    struct chat *chat;
    struct chat_text text;
    *out = NULL;
    int rc = chat_open(source, strlen(source), &chat, fault);
    if (rc != 0) return rc;
    rc = chat_render(chat, &(struct chat_input){.context = context}, arena, &text, fault);
    chat_close(chat);
    *out = rc == 0 ? text.text : NULL;
    return rc;
}

int32_t engine_chat_border(const struct engine *e, const cJSON *context,
                           const struct engine_ids *ids) {
    return (int32_t)text_chat_border(&e->text, context, ids->ids, ids->count,
                                     CONVERSATION_PREFIX_MIN);
}

size_t engine_token_bytes(const struct engine *e, int32_t id, const char **bytes) {
    return tok_bytes(e->text.tok, id, bytes);
}

size_t engine_first_bytes(const struct engine *e, int32_t id, const char **bytes) {
    return tok_bytes_first(e->text.tok, id, bytes);
}

size_t engine_token_name(const struct engine *e, int32_t id, const char **name) {
    return tok_name(e->text.tok, id, name);
}

int engine_added_after(const struct engine *e) {
    return tok_added_after(e->text.tok);
}

int engine_added_before(const struct engine *e) {
    return tok_added_before(e->text.tok);
}

static bool ends_answers(const struct engine *e, int32_t id) {
    for (int i = 0; i < e->end_count; i++)
        if (e->ends[i] == id) return true;
    return false;
}

void engine_show_tokens(struct engine *e, const char *text, size_t size) {
    struct arena arena;
    struct tok_ids ids = {0};
    arena_open(&arena, SHOWN_BYTES_MAX);
    (void)tok_encode(e->text.tok, text, size, TOK_SPECIALS, NULL, 0, SIZE_MAX, &arena, &ids, NULL);
    for (size_t i = 0; i < ids.count; i++)
        if (!ends_answers(e, ids.ids[i])) tok_show(e->text.tok, ids.ids[i]);
    arena_close(&arena);
}

bool engine_can_show(const struct engine *e, const char *text, size_t size) {
    struct arena arena;
    struct tok_ids ids = {0};
    arena_open(&arena, SHOWN_BYTES_MAX);
    bool can = tok_encode(e->text.tok, text, size, TOK_SPECIALS, NULL, 0, SIZE_MAX, &arena, &ids,
                          NULL) == 0;
    for (size_t i = 0; i < ids.count; i++) can = can && !ends_answers(e, ids.ids[i]);
    arena_close(&arena);
    return can;
}

bool engine_token_is_special(const struct engine *e, int32_t id) {
    return tok_is_special(e->text.tok, id);
}

/* ---- Constraints ---- */

int engine_constraint_open(struct engine *e, const struct constrain_part *part,
                           struct engine_constraint **out, struct fault *fault) {
    return constraint_open(&e->constraints, part, out, fault);
}

void engine_constraint_close(struct engine *e, struct engine_constraint *constraint) {
    constraint_close(&e->constraints, constraint);
}

/* ---- Adapters ---- */

static void wake_replicas(struct engine *e) {
    for (int i = 0; i < e->replica_count; i++) replica_wake(&e->replicas[i]);
}

bool engine_adapter_take(struct engine *e, const char *name, struct engine_adapter *out) {
    return adapters_find(&e->adapters, name, out);
}

void engine_adapter_leave(struct engine *e, int32_t number) {
    if (adapters_leave(&e->adapters, number)) wake_replicas(e);
}

/* Finds the file or directory, which lies in the folder for adapters. `whole` and `found` have
 * PATH_MAX bytes, for the folder's path and for that of the file or directory. */
static int find_adapter_path(const struct engine *e, const char *path, char *whole, char *found,
                             struct fault *fault) {
    const char *folder = e->options.adapter_dir;
    char joined[PATH_MAX];
    if (!folder || !*folder)
        return fault_set(fault, ERR_UNSUPPORTED, "lora_path",
                         "no adapters may be loaded while this server runs (--lora-dir)");
    const int n = path[0] == '/' ? snprintf(joined, sizeof joined, "%s", path)
                                 : snprintf(joined, sizeof joined, "%s/%s", folder, path);
    if (n < 0 || (size_t)n >= sizeof joined)
        return fault_set(fault, ERR_INVALID, "lora_path", "the path is too long");
    const bool there = realpath(folder, whole) && realpath(joined, found);
    const size_t size = there && strcmp(whole, "/") != 0 ? strlen(whole) : 0;
    if (there && strncmp(found, whole, size) == 0 && found[size] == '/') return 0;
    return fault_set(fault, ERR_NOTFOUND, "lora_path",
                     "'%.200s' is not in the folder for adapters (--lora-dir)", path);
}

/* Takes the folder's path out of a text for clients, so that files are named by their paths in it.
 * Faults cut long paths: what is left of one goes, too. */
static void hide_adapter_folder(char *text, const char *whole) {
    char head[64], *at;
    if (strcmp(whole, "/") == 0) return; /* every path in it is whole */
    snprintf(head, sizeof head, "%.63s", whole);
    while ((at = strstr(text, head))) {
        size_t size = 0;
        while (whole[size] && at[size] == whole[size]) size++;
        if (at[size] == '/') size++;
        memmove(at, at + size, strlen(at + size) + 1);
    }
}

int engine_adapter_load(struct engine *e, const char *name, const char *path, struct fault *fault) {
    char whole[PATH_MAX], found[PATH_MAX];
    int number;
    int rc = find_adapter_path(e, path, whole, found, fault);
    if (rc) return rc;
    for (int i = 0; i < e->replica_count && !rc; i++)
        if (!replica_runs(&e->replicas[i]))
            rc = fault_set(fault, ERR_STOPPED, "", "%s", err_text(ERR_STOPPED));
    if (rc) return rc;
    rc = adapters_read(&e->adapters, model_config(e->replicas[0].model), name, found, &number,
                       fault);
    if (rc) {
        hide_adapter_folder(fault->field, whole);
        hide_adapter_folder(fault->text, whole);
        return rc;
    }
    wake_replicas(e);
    rc = adapters_wait(&e->adapters, number, e->replica_count, fault);
    if (rc) wake_replicas(e); /* replicas that have it remove it */
    return rc;
}

int engine_adapter_unload(struct engine *e, const char *name) {
    if (!adapters_remove(&e->adapters, name)) return ERR_NOTFOUND;
    wake_replicas(e);
    return 0;
}

int engine_adapters(struct engine *e, struct engine_adapter_row *rows, int max) {
    return adapters_list(&e->adapters, rows, max);
}

/* ---- Observation ---- */

void engine_replica_status(struct engine *e, int replica, struct engine_status *out) {
    struct store *store = e->replicas[replica].store;
    struct store_stats stats = {0};
    replica_status(&e->replicas[replica], out);
    if (!store || replica > 0) return;
    store_stats(store, &stats);
    out->conversations_on_disk = stats.files;
    out->state_bytes = stats.bytes;
    out->state_written = stats.written;
    out->state_refused = stats.refused;
    out->counters.state_failed += stats.failed;
}

static bool is_busy(const struct engine_status *status) {
    return status->running > 0 || status->waiting > 0;
}

/* Returns the time of the busy replica that has been silent for longest; when none is busy, the
 * latest time. */
static int64_t join_times(const struct engine_status *a, const struct engine_status *b) {
    int64_t first = a->progress_ns, last = b->progress_ns;
    if (is_busy(a) != is_busy(b)) return is_busy(a) ? first : last;
    if (first > last) first = b->progress_ns, last = a->progress_ns;
    return is_busy(a) ? first : last;
}

static void add_status(struct engine_status *sum, const struct engine_status *one) {
    sum->progress_ns = join_times(sum, one);
    sum->jobs += one->jobs;
    sum->running += one->running;
    sum->waiting += one->waiting;
    sum->conversations += one->conversations;
    sum->pages_total += one->pages_total;
    sum->pages_used += one->pages_used;
    sum->pages_reserved += one->pages_reserved;
    sum->pages_retained += one->pages_retained;
    sum->pages_superseded += one->pages_superseded;
    sum->pages_pinned += one->pages_pinned;
    sum->tokens_retained += one->tokens_retained;
    sum->stopped |= one->stopped;
    sum->entries_kept += one->entries_kept;
    sum->entries_superseded += one->entries_superseded;
    sum->entries_evicted += one->entries_evicted;
    sum->rank_cap_hits += one->rank_cap_hits;
    engine_counters_add(&sum->counters, &one->counters);
}

void engine_status(struct engine *e, struct engine_status *out) {
    struct engine_status one;
    engine_replica_status(e, 0, out);
    for (int i = 1; i < e->replica_count; i++) {
        engine_replica_status(e, i, &one);
        add_status(out, &one);
    }
}

int engine_sequences(struct engine *e, struct engine_sequence_row *rows, int max) {
    int count = 0;
    for (int i = 0; i < e->replica_count; i++)
        count += replica_sequences(&e->replicas[i], rows + count, max - count);
    return count;
}

static struct engine_conversation_row *row_with(struct engine_conversation_row *rows, int count,
                                                uint64_t id) {
    for (int i = 0; i < count; i++)
        if (rows[i].id == id) return &rows[i];
    return NULL;
}

/* Adds the conversations on disk: the file size to an existing row, or a new row. */
static int list_disk(struct engine *e, const struct engine_conversation_filter *filter,
                     struct engine_conversation_row *rows, int count, int max) {
    struct store_row *files = mem_try_alloc((size_t)max, sizeof *files);
    int file_count = files ? store_list(e->replicas[0].store, filter, files, max) : 0,
        in_memory = count;
    int64_t now = clock_unix_seconds();
    for (int i = 0; i < file_count; i++) {
        struct engine_conversation_row *row = row_with(rows, in_memory, files[i].id);
        if (!row && count == max) continue;
        if (!row) {
            row = &rows[count++];
            *row = (struct engine_conversation_row){.id = files[i].id,
                                                    .replica = -1,
                                                    .hint = files[i].hint,
                                                    .tokens = files[i].tokens,
                                                    .ttl = files[i].ttl,
                                                    .budget = kv_params_shown_budget(&files[i].kv),
                                                    .idle_ns =
                                                        (now - files[i].used_unix) * 1000000000};
            memcpy(row->space, files[i].space, sizeof row->space);
            stpncpy(row->policy, files[i].kv.policy->name, sizeof row->policy - 1);
        }
        row->disk_bytes = files[i].bytes;
    }
    mem_free(files);
    return count;
}

int engine_conversations(struct engine *e, const struct engine_conversation_filter *filter,
                         struct engine_conversation_row *rows, int max) {
    int count = 0;
    for (int i = 0; i < e->replica_count; i++)
        count += replica_conversations(&e->replicas[i], filter, rows + count, max - count);
    return e->replicas[0].store && max > 0 ? list_disk(e, filter, rows, count, max) : count;
}
