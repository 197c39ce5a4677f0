/* Options: one table (config.c) with name, type, range, default, reloadable and help feeds flags,
 * environment (KEEPD_KV_BUDGET for --kv-budget) and the configuration file (inih; key = value).
 * Order: flags over environment over file over defaults. The command line also takes the options of
 * other servers (foreign.h), `serve` in front and the model without a name. */
#ifndef KEEPD_CONFIG_CONFIG_H
#define KEEPD_CONFIG_CONFIG_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "base/err.h"

/* The values of an option that may be given several times. All come from the strongest source that
 * names the option. */
struct config_list {
    char **items;
    size_t count;
};

struct config {
    char *config_file;           /* --config */
    char *model;                 /* required */
    char *host;                  /* 127.0.0.1 */
    int64_t port;                /* 8080; 0 = any free port, printed in the ready line */
    char *served_model_name;     /* default: the model directory's name */
    struct config_list api_keys; /* none = open */
    char *kv_policy;             /* "auto": the engine chooses, see engine_options */
    int64_t kv_budget, kv_budget_max, kv_buffer, kv_chunk;
    bool kv_budget_given;  /* some source names it */
    int64_t kv_pool_bytes; /* accepts K, M, G suffixes; 0 = chosen */
    char *kv_overflow;     /* auto, error, shift */
    char *kv_dtype;        /* auto, f32, bf16, fp8, fp8_e4m3, q8, q4 */
    char *gates;           /* NULL = found, see engine_options */
    char *fit;             /* auto, never */
    char *gates_cache;     /* NULL = by the environment */
    int64_t max_num_seqs, max_num_batched_tokens, max_model_len, default_max_tokens;
    int64_t step_stretch; /* percent; 0 = no limit */
    int64_t speculate;    /* drafted tokens; 0 = none */
    int64_t seed;         /* the seed of requests without one; -1 = random */
    double temperature, top_p, top_k, min_p, repetition_penalty; /* NAN = the model's own */
    char *state_dir; /* NULL = conversations end with the process */
    int64_t max_choices, max_logprobs, state_bytes, state_idle;
    int64_t max_queue, max_conversations, max_body_bytes, max_connections, drain_seconds;
    int64_t max_header_bytes, max_connections_per_client, max_queue_tokens;
    int64_t request_timeout, rate_limit; /* seconds; requests per minute and key */
    char *unix_socket, *unix_socket_mode;
    char *tls_cert, *tls_key;
    char *api_key_file;
    struct config_list allowed_hosts, cors_origins;
    int64_t data_parallel_size, tensor_parallel_size, kv_rank_cap, threads;
    char *device;          /* auto, cpu, cuda */
    char *cpu_path;        /* auto, reference, portable, neon, avx2, avx512, amx */
    char *cpu_activations; /* auto, int8, int16, bf16, f32 */
    char *log_format;      /* plain, json */
    char *log_level;       /* error, warn, info, debug */
    bool random_weights;   /* read only config.json from the model directory (timing) */
    char *quantization;    /* none, fp8, q8, q4 */
    bool strict_params;    /* unknown request fields are a 400 */
    bool no_ui;            /* no page at / */
    char *otlp_endpoint;   /* where spans are sent */
    char *chat_template;
    char *reasoning_parser;
    char *tool_call_parser;
    char *inspect;              /* a model to describe, as --model */
    char *quantize_to;          /* where the model is saved with rounded matrices */
    int64_t quantize_calibrate; /* tokens by which that is calibrated; 0: it is not */
    char *completion;           /* a shell: bash, zsh, fish */
    bool check_config, help, man, version;
    struct config_list notes; /* sentences about the sources, for people */
};

/* Fills *config; on failure nothing is left to close. ERR_INVALID (ERR_IO, ERR_MALFORMED or
 * ERR_LIMIT for the file) names the option in fault->field and the source in the text. With --help,
 * --man or --version on the command line nothing else is read or required. */
int config_load(int argc, char **argv, char **envp, struct config *config, struct fault *fault);
void config_close(struct config *config);

bool config_is_option(const char *name); /* "kv-policy" */

/* For SIGHUP: takes the values of options marked RELOADABLE from `fresh`, which was loaded with the
 * same arguments. Other options keep their values until a restart. `changed` is called for every
 * option whose value differs; `taken` tells whether it was applied. */
void config_reload(struct config *config, struct config *fresh,
                   void (*changed)(void *arg, const char *option, bool taken), void *arg);

void config_man(FILE *out, const char *version); /* the table, as keepd.1 */
void config_help(FILE *out);                     /* the table, for people */
/* A completion script from the table; shell: "bash", "zsh" or "fish". */
void config_complete(FILE *out, const char *shell);
void config_print(const struct config *config, FILE *out); /* effective values, for --check-config;
                                                               secrets are masked */

#endif
