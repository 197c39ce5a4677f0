/* The replica's thread and its lock: jobs and orders come in, the scheduler runs step by step, and
 * the state that others may see is published after each step and when a step has admitted jobs.
 * Other threads never touch the scheduler. */
#include "engine/replica.h"

#include <stdio.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "engine/draft_model.h"
#include "engine/encoder.h"

/* ---- Opening ---- */

void replica_open(struct replica *r, int index, struct replica_common *common) {
    pthread_condattr_t monotonic;
    *r = (struct replica){.index = index, .common = common};
    pthread_mutex_init(&r->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&r->work, &monotonic);
    pthread_condattr_destroy(&monotonic);
    ring_open(&r->submits, (size_t)common->max_queue);
    ring_open(&r->orders, ENGINE_ORDERS_MAX);
}

static int model_step_of(void *model, const struct kern_batch *batch, const int32_t *want,
                         int want_count, const float **logits, const float **hidden) {
    return model_step_hidden(model, batch, want, want_count, logits, hidden);
}

static void bring_states(void *model, const struct kern_span *spans, int count) {
    model_bring_states(model, spans, count);
}

static const float *wanted_hidden(void *model) {
    return model_wanted_hidden(model);
}

static int end_vector(void *model, const float *pooled, float *out) {
    return model_end_vector(model, pooled, out);
}

static void publish(struct replica *r);

/* A step may read a part of a prompt that takes seconds: its job is shown as running meanwhile. */
static void publish_admitted(void *arg) {
    publish(arg);
}

void replica_ready(struct replica *r, const struct sched_options *options) {
    struct sched_options own = *options;
    own.kern = r->kern;
    own.model = r->model;
    own.model_step = model_step_of;
    own.wanted_hidden = wanted_hidden;
    own.bring_states = r->kern->ops->peeks ? bring_states : NULL;
    own.end_vector = model_ending(model_config(r->model)).count > 0 ? end_vector : NULL;
    own.store = r->store;
    own.mask_wake = (struct mask_wake){replica_wake, r};
    own.answered = r->common->wake;
    own.answered_arg = r->common->arg;
    own.admitted = publish_admitted;
    own.admitted_arg = r;
    own.queue_places = &r->waiting;
    own.pending_jobs = &r->pending;
    own.pending_tokens = &r->tokens;
    sched_open(&r->sched, &own);
    r->sequence_rows = mem_must_alloc((size_t)own.sequences_max, sizeof *r->sequence_rows);
    r->copy_count = r->sched.keeper.table.capacity;
    r->conversation_copies =
        mem_must_alloc((size_t)r->copy_count + 1, sizeof *r->conversation_copies);
    publish(r);
}

/* ---- Publishing ---- */

static void copy_sequences(struct replica *r) {
    const struct sched *s = &r->sched;
    int64_t streams = reserve_all_streams(&s->options.shape);
    r->sequence_count = s->running;
    for (int i = 0; i < s->running; i++) {
        const struct sequence *seq = &s->sequences[s->order[i]];
        struct engine_sequence_row *row = &r->sequence_rows[i];
        int64_t entries = due_entries(&s->options.shape, &seq->kv, &seq->due);
        *row = (struct engine_sequence_row){.replica = r->index,
                                            .tokens = seq->due.tokens,
                                            .held = (int32_t)((entries + streams - 1) / streams),
                                            .prompt_count = seq->prompt_count,
                                            .output_count = seq_output_count(seq),
                                            .budget = kv_params_shown_budget(&seq->kv),
                                            .pages_reserved = seq->pages_reserved,
                                            .prefilling = seq_prefilling(seq)};
        stpncpy(row->policy, seq->kv.policy->name, sizeof row->policy - 1);
    }
}

/* There may be a thousand conversations and a thousand steps a second, so only what changed. */
static void copy_conversations(struct replica *r) {
    const struct conversation_table *table = &r->sched.keeper.table;
    if (r->conversation_changes == table->changes) return;
    r->conversation_changes = table->changes;
    for (int i = 0; i < table->capacity; i++) {
        const struct conversation *c = &table->all[i];
        struct conversation_copy *copy = &r->conversation_copies[i];
        if (copy->of.change == c->change) continue;
        if (copy->of.id != c->id) { /* otherwise the tokens are the same */
            int32_t count = c->id == 0 ? 0 : conversation_mark_count(c->token_count);
            mem_free(copy->marks);
            copy->marks = count > 0 ? mem_try_alloc((size_t)count, sizeof *copy->marks) : NULL;
            if (copy->marks) conversation_make_marks(c, copy->marks);
        }
        copy->of = *c;
        copy->of.tokens = NULL;
        copy->row = (struct engine_conversation_row){.id = c->id,
                                                     .replica = r->index,
                                                     .hint = c->hint,
                                                     .superseded = conversation_superseded(c)};
        if (c->id == 0) continue;
        memcpy(copy->row.space, c->space, sizeof copy->row.space);
        copy->row.tokens = c->token_count;
        copy->row.held = c->held;
        copy->row.budget = kv_params_shown_budget(&c->kv);
        copy->row.pages = c->pages;
        copy->row.pinned = c->pinned;
        copy->row.ttl = c->ttl;
        stpncpy(copy->row.policy, c->kv.policy->name, sizeof copy->row.policy - 1);
    }
}

static int64_t at_most_used(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* Copies what others may see. Running sequences count their entries by formula. Conversations count
 * all of their pages, shared ones included, because admission must do so; at most the pages in use
 * are shown, which is exact while nothing runs. */
static void publish(struct replica *r) {
    const struct sched *s = &r->sched;
    struct kern_cache_stats stats = {0};
    r->kern->ops->cache_stats(r->kern, &stats);
    int64_t held = 0;
    for (int i = 0; i < s->running; i++) {
        const struct sequence *seq = &s->sequences[s->order[i]];
        held += due_entries(&s->options.shape, &seq->kv, &seq->due);
    }
    bool may_save = s->options.store && !r->status.stopped; /* only a drain needs it */
    atomic_store(&r->unsaved, may_save && (!atomic_load(&r->common->draining) ||
                                           keeper_unsaved(&r->sched.keeper)));
    uint64_t progress = sched_progress(&r->sched);
    /* An idle replica makes progress by definition: its watchdog has nothing to report. */
    if (progress != r->progress || sched_idle(&r->sched)) r->progress_ns = clock_ns();
    r->progress = progress;
    pthread_mutex_lock(&r->lock);
    copy_sequences(r);
    copy_conversations(r);
    r->status = (struct engine_status){
        .running = s->running,
        .waiting = s->queue.waiting,
        .conversations = s->keeper.table.count,
        .pages_total = s->options.pages_total,
        .pages_used = stats.rank_pages_used,
        .pages_reserved = s->keeper.pages_reserved,
        .pages_retained = at_most_used(s->keeper.table.pages, stats.rank_pages_used),
        .pages_superseded = at_most_used(s->keeper.table.superseded_pages, stats.rank_pages_used),
        .pages_pinned = conversation_pins_of(&s->keeper.table, NULL).pages,
        .tokens_retained = s->keeper.table.tokens,
        .progress_ns = r->progress_ns,
        .stopped = r->status.stopped,
        .entries_kept =
            (uint64_t)(held + s->keeper.table.entries - s->keeper.table.superseded_entries),
        .entries_superseded = (uint64_t)s->keeper.table.superseded_entries,
        .entries_evicted = stats.entries_evicted,
        .rank_cap_hits = stats.rank_cap_hits,
        .counters = s->counters,
    };
    pthread_mutex_unlock(&r->lock);
}

/* ---- The thread ---- */

static void accept_submits(struct replica *r) {
    struct engine_job *job;
    while ((job = ring_pop(&r->submits)) != NULL) sched_submit(&r->sched, job);
}

/* Notes this replica's answer to an order; the last one ends the order. Success is the answer if
 * one replica reports it: another may have an older copy that cannot be written. */
static void finish_order(struct replica *r, struct engine_order *order, int rc) {
    int code = atomic_load(&order->code);
    while (rc != ERR_NOTFOUND && code != 0 &&
           !atomic_compare_exchange_weak(&order->code, &code, rc))
        continue;
    if (atomic_fetch_sub(&order->replicas_left, 1) > 1) return;
    order->result = atomic_load(&order->code);
    atomic_fetch_sub(&r->common->orders, 1);
    atomic_store_explicit(&order->done, 1, memory_order_release);
}

/* Answers the orders whose conversation is written, or never will be. Returns how many. */
static int end_writes(struct replica *r) {
    int left = 0, ended = 0;
    for (int i = 0; i < r->write_count; i++) {
        struct engine_order *order = r->writes[i];
        int rc = keeper_write(&r->sched.keeper, order->id);
        bool waits = rc == ERR_BUSY && !atomic_load(&r->common->stopping) && !r->status.stopped;
        if (waits)
            r->writes[left++] = order;
        else
            finish_order(r, order, rc == ERR_BUSY ? ERR_STOPPED : rc);
        ended += !waits;
    }
    r->write_count = left;
    return ended;
}

/* Carries out orders, between steps. A client whose order to delete is done sees lists without the
 * conversation. */
static void run_orders(struct replica *r) {
    struct engine_order *deletes[ENGINE_ORDERS_MAX], *order;
    int codes[ENGINE_ORDERS_MAX], count = 0;
    while (count < ENGINE_ORDERS_MAX && (order = ring_pop(&r->orders)) != NULL) {
        if (order->kind == ENGINE_ORDER_WRITE) {
            r->writes[r->write_count++] = order; /* at most ENGINE_ORDERS_MAX exist */
            continue;
        }
        codes[count] = keeper_delete(&r->sched.keeper, order->id);
        deletes[count++] = order;
    }
    int ended = end_writes(r);
    if (count > 0) publish(r);
    for (int i = 0; i < count; i++) finish_order(r, deletes[i], codes[i]);
    if (count + ended > 0) r->common->wake(r->common->arg);
}

/* Places and removes adapters, between steps. */
static void attend_adapters(struct replica *r) {
    const unsigned changes = atomic_load(&r->common->adapters->changes);
    if (changes == r->adapter_changes) return;
    r->adapter_changes = changes;
    adapters_attend(r->common->adapters, r->index, r->model);
}

/* Waits on the condition, with the lock held, until a signal or the given time. */
static void sleep_until(struct replica *r, int64_t ns) {
    struct timespec at = {ns / 1000000000, ns % 1000000000};
    if (ns == INT64_MAX)
        pthread_cond_wait(&r->work, &r->lock);
    else
        (void)pthread_cond_timedwait(&r->work, &r->lock, &at);
}

/* Sleeps until there is work or the end, or a conversation has been idle for so long that it is to
 * be written, or one's time to live ends; the status then shows that work waits. While all jobs
 * wait for the store or for masks, only new work, cancelling and what they wait for end it;
 * cancelling does not signal, so that is looked for. */
static void wait_for_work(struct replica *r) {
    int64_t next = keeper_next_save_ns(&r->sched.keeper);
    bool idle = sched_idle(&r->sched);
    if (atomic_load(&r->common->draining) && next != INT64_MAX)
        return; /* during a drain no conversation was used too recently to be written */
    bool expires = !r->status.stopped; /* nothing is deleted after the backend has failed */
    if (expires && r->sched.keeper.table.expires_ns < next) next = r->sched.keeper.table.expires_ns;
    if (!idle) next = clock_ns() + 50000000;
    pthread_mutex_lock(&r->lock);
    while (!atomic_load(&r->common->stopping)) {
        accept_submits(
            r); /* under the lock: a submit after this look finds us waiting and signals */
        if (sched_idle(&r->sched) != idle || !ring_empty(&r->orders) || r->woken) break;
        if (!idle && !sched_stalled(&r->sched)) break; /* a new job may pass the head */
        if (clock_ns() >= next || (atomic_load(&r->common->draining) && !r->drain_seen)) break;
        sleep_until(r, next);
    }
    if (idle) r->progress_ns = clock_ns(); /* the time without progress begins with the work */
    r->drain_seen = atomic_load(&r->common->draining);
    r->woken = false;
    pthread_mutex_unlock(&r->lock);
}

/* A device error is sticky: never continue on a poisoned context. Later jobs fail at once. */
static void stop_serving(struct replica *r) {
    log_error("the backend failed; the engine takes no more work and the process must restart");
    keeper_end_saving(&r->sched.keeper);
    pthread_mutex_lock(&r->lock);
    r->status.stopped = true;
    pthread_mutex_unlock(&r->lock);
}

static void *replica_main(void *arg) {
    struct replica *r = arg;
    bool failed = false;
    if (r->kern->ops->bind) r->kern->ops->bind(r->kern);
    while (!atomic_load(&r->common->stopping)) {
        accept_submits(r);
        if (!failed) keeper_save(&r->sched.keeper, clock_ns(), atomic_load(&r->common->draining));
        run_orders(r); /* keeper_save has noted what was written */
        attend_adapters(r);
        if (!failed) keeper_expire(&r->sched.keeper, clock_ns());
        if (sched_idle(&r->sched)) {
            publish(r);
            if (atomic_load(&r->common->draining) && !atomic_load(&r->unsaved))
                r->common->wake(r->common->arg); /* replica_idle holds now */
            if (!keeper_copying(&r->sched.keeper)) wait_for_work(r);
            publish(r);
            continue;
        }
        bool fails_now = false;
        if (failed)
            sched_abandon(&r->sched, ENGINE_FINISH_ERROR, ERR_DEVICE);
        else
            sched_step(&r->sched, &fails_now);
        if (fails_now) stop_serving(r);
        failed |= fails_now;
        publish(r);
        /* After the status, so that a client that has its answer sees its pages returned. */
        sched_publish_finished(&r->sched);
        r->common->wake(r->common->arg);
        if (sched_stalled(&r->sched) && !keeper_copying(&r->sched.keeper)) wait_for_work(r);
    }
    run_orders(r);
    pthread_mutex_lock(&r->lock);
    r->status.stopped = true;
    pthread_mutex_unlock(&r->lock);
    r->common->wake(r->common->arg);
    return NULL;
}

int replica_start(struct replica *r) {
    CHECK(!r->started && r->common->wake);
    if (pthread_create(&r->thread, NULL, replica_main, r) != 0) return ERR_NOMEM;
    r->started = true;
    return 0;
}

void replica_signal(struct replica *r) {
    pthread_mutex_lock(&r->lock);
    pthread_cond_signal(&r->work);
    pthread_mutex_unlock(&r->lock);
}

void replica_stop(struct replica *r) {
    replica_signal(r);
    if (r->started) pthread_join(r->thread, NULL);
    r->started = false;
}

void replica_close(struct replica *r) {
    CHECK(!r->started);
    if (r->kern && r->kern->ops->bind) r->kern->ops->bind(r->kern);
    if (r->sched.sequences) {
        accept_submits(r);
        sched_close(&r->sched);
    }
    store_close(r->store);
    draft_model_close(r); /* a block uses memory of the model */
    encoder_close(&r->encoder);
    model_close(r->model);
    if (r->kern) r->kern->ops->close(r->kern);
    ring_close(&r->submits);
    ring_close(&r->orders);
    pthread_cond_destroy(&r->work);
    pthread_mutex_destroy(&r->lock);
    mem_free(r->sequence_rows);
    for (int i = 0; i < r->copy_count && r->conversation_copies; i++)
        mem_free(r->conversation_copies[i].marks);
    mem_free(r->conversation_copies);
}

/* ---- From other threads ---- */

bool replica_idle(struct replica *r) {
    if (atomic_load(&r->pending) > 0) return false;
    return !r->started || !atomic_load(&r->common->draining) || !atomic_load(&r->unsaved);
}

bool replica_has_capacity(const struct replica *r) {
    return atomic_load(&r->waiting) < r->common->max_queue;
}

void replica_submit(struct replica *r, struct engine_job *job) {
    job->replica = r->index;
    if (atomic_load(&r->pending) == 0) atomic_store(&r->busy_ns, clock_ns());
    atomic_fetch_add(&r->waiting, 1);
    atomic_fetch_add(&r->pending, 1);
    atomic_fetch_add(&r->tokens, sched_job_tokens(job));
    bool pushed = ring_push(&r->submits, job);
    CHECK(pushed); /* the caller asked for room */
    replica_signal(r);
}

bool replica_runs(struct replica *r) {
    pthread_mutex_lock(&r->lock);
    bool runs = r->started && !r->status.stopped && !atomic_load(&r->common->stopping);
    pthread_mutex_unlock(&r->lock);
    return runs;
}

void replica_order(struct replica *r, struct engine_order *order) {
    bool pushed = ring_push(&r->orders, order);
    CHECK(pushed); /* the ring holds as many as may wait */
    replica_signal(r);
}

void replica_affinity(struct replica *r, struct conversation_search *search,
                      struct conversation_affinity *best) {
    uint64_t hint = search->query->hint;
    pthread_mutex_lock(&r->lock);
    for (int i = 0; i < r->copy_count; i++) {
        const struct conversation_copy *copy = &r->conversation_copies[i];
        int32_t usable =
            copy->row.id != 0 ? conversation_usable_or_cut(search, &copy->of, copy->marks) : 0;
        if (usable > 0)
            conversation_affinity_note(best, usable, hint != 0 && copy->row.hint == hint);
    }
    pthread_mutex_unlock(&r->lock);
}

void replica_status(struct replica *r, struct engine_status *out) {
    pthread_mutex_lock(&r->lock);
    *out = r->status;
    pthread_mutex_unlock(&r->lock);
    out->jobs = atomic_load(&r->pending);
    out->waiting = atomic_load(&r->waiting);    /* also those that came while a step runs */
    int64_t busy_ns = atomic_load(&r->busy_ns); /* the thread may not have woken yet */
    if (out->progress_ns < busy_ns) out->progress_ns = busy_ns;
}

int replica_sequences(struct replica *r, struct engine_sequence_row *rows, int max) {
    pthread_mutex_lock(&r->lock);
    int count = r->sequence_count < max ? r->sequence_count : max;
    memcpy(rows, r->sequence_rows, (size_t)count * sizeof *rows);
    pthread_mutex_unlock(&r->lock);
    return count;
}

int replica_conversations(struct replica *r, const struct engine_conversation_filter *filter,
                          struct engine_conversation_row *rows, int max) {
    int count = 0;
    int64_t now = clock_ns();
    pthread_mutex_lock(&r->lock);
    for (int i = 0; i < r->copy_count && count < max; i++) {
        const struct conversation_copy *copy = &r->conversation_copies[i];
        if (copy->row.id == 0) continue;
        if (!engine_conversation_is(filter, copy->row.space, copy->row.id)) continue;
        rows[count] = copy->row;
        rows[count++].idle_ns = now - copy->of.last_used_ns;
    }
    pthread_mutex_unlock(&r->lock);
    return count;
}

void replica_wake(void *arg) {
    struct replica *r = arg;
    pthread_mutex_lock(&r->lock);
    r->woken = true;
    pthread_cond_signal(&r->work);
    pthread_mutex_unlock(&r->lock);
}
