#include "config/foreign.h"

#include <string.h>

#define SAME(name, option)                                                                         \
    { name, option, NULL, FOREIGN_SAME, FOREIGN_ONE }
#define SET(name, option, value)                                                                   \
    { name, option, value, FOREIGN_SET, FOREIGN_FLAG }
#define FRONT(name, option, text)                                                                  \
    { name, option, text, FOREIGN_FRONT, FOREIGN_ONE }
#define NOTHING(name, value, why)                                                                  \
    { name, NULL, why, FOREIGN_NOTHING, FOREIGN_##value }
#define INSTEAD(name, text)                                                                        \
    { name, NULL, text, FOREIGN_INSTEAD, FOREIGN_FLAG }

#define WHOLE_DEVICE   "the whole model is always on one device (--device)"
#define IN_CONFIG_JSON "change rope_scaling in the model's config.json"
#define ALWAYS         "keepd always does so"
#define NO_SAMPLER     "leave it out: keepd has no such sampler"
#define NO_VECTORS     "merge the vector into the model: keepd loads none"
#define ENCODER        "use --mmproj FILE"
#define SEES           "a model sees pictures where it has an encoder (--mmproj)"
#define EMBEDDINGS     "leave it out: /v1/embeddings and /v1/rerank need no option"
#define ALL_TASKS      "each route is served that the model has"
#define DRAFTS         "keepd guesses tokens from the text and by --draft-model (--speculate)"
#define GPUS           "use --tensor-parallel-size; CUDA_VISIBLE_DEVICES selects GPUs"
#define IN_NAME        "use --model hf:OWNER/NAME"
#define IN_REQUESTS    "leave it out: requests give it"
#define POOL           "use --kv-pool-bytes, such as 8G; without it the cache takes what weights leave free"

static const struct foreign rows[] = {
    /* clang-format off */
    /* the model */
    SAME("-m", "model"), SAME("--model-path", "model"), SAME("--model-tag", "model"),
    SAME("-a", "served-model-name"), SAME("--alias", "served-model-name"), SAME("--served-model-names", "served-model-name"),
    SAME("-c", "max-model-len"), SAME("--ctx-size", "max-model-len"), SAME("--context-length", "max-model-len"), SAME("--n-ctx", "max-model-len"),
    SAME("-q", "quantization"),
    FRONT("-hf", "model", "hf:"), FRONT("-hfr", "model", "hf:"), FRONT("--hf-repo", "model", "hf:"),
    INSTEAD("-hff", IN_NAME ":FILE.gguf"), INSTEAD("--hf-file", IN_NAME ":FILE.gguf"), INSTEAD("--revision", IN_NAME "@REVISION"),
    INSTEAD("-hft", "set HF_TOKEN in the environment"), INSTEAD("--hf-token", "set HF_TOKEN in the environment"),
    NOTHING("--code-revision", ONE, "keepd runs no code of models"),
    INSTEAD("-dr", "use --model hf:OWNER/NAME"), INSTEAD("--docker-repo", "use --model hf:OWNER/NAME"),
    INSTEAD("-mu", "use curl -LO URL, then keepd --model FILE"), INSTEAD("--model-url", "use curl -LO URL, then keepd --model FILE"),
    INSTEAD("--download-dir", "set HF_HUB_CACHE in the environment"), INSTEAD("--offline", "set HF_HUB_OFFLINE=1 in the environment"),
    INSTEAD("--tokenizer", "put tokenizer.json into the model's directory"), INSTEAD("--tokenizer-path", "put tokenizer.json into the model's directory"),
    NOTHING("--tokenizer-mode", ONE, "there is one tokenizer"), NOTHING("--tokenizer-revision", ONE, "the tokenizer is the model's"),
    NOTHING("--trust-remote-code", FLAG, "keepd runs no code of models"),
    NOTHING("--load-format", ONE, "the format of files is found"), NOTHING("--dtype", ONE, "weights keep the format of their files"),
    NOTHING("--task", ONE, ALL_TASKS), NOTHING("--runner", ONE, ALL_TASKS), NOTHING("--model-impl", ONE, "there is one implementation"),
    INSTEAD("--hf-overrides", "change the model's config.json"), INSTEAD("--json-model-override-args", "change the model's config.json"),
    INSTEAD("--override-kv", "change the model's file"), INSTEAD("--rope-*", IN_CONFIG_JSON), INSTEAD("--yarn-*", IN_CONFIG_JSON),
    SAME("--chat-template-file", "chat-template"),
    INSTEAD("--chat-template-kwargs", IN_REQUESTS), INSTEAD("--default-chat-template-kwargs", IN_REQUESTS),
    NOTHING("--jinja", FLAG, ALWAYS), NOTHING("--no-jinja", FLAG, "there is one template engine"), NOTHING("--special", FLAG, "requests say it: skip_special_tokens"),
    SAME("--lora-modules", "lora"), SAME("--lora-paths", "lora"), NOTHING("--enable-lora", FLAG, "--lora turns them on"), NOTHING("--max-lora-rank", ONE, "adapters of ranks up to 512 are served"), NOTHING("--max-cpu-loras", ONE, "--max-loras bounds them"), NOTHING("--fully-sharded-loras", FLAG, ALWAYS),
    INSTEAD("--lora-scaled", "use --lora; a request cannot scale an adapter"), INSTEAD("--control-vector*", NO_VECTORS),
    SAME("-mm", "mmproj"), NOTHING("--mmproj-offload", FLAG, WHOLE_DEVICE), NOTHING("--no-mmproj-offload", FLAG, WHOLE_DEVICE), NOTHING("--mmproj-auto", FLAG, SEES), NOTHING("--no-mmproj-auto", FLAG, SEES), INSTEAD("--mmproj-*", ENCODER), INSTEAD("-mmu", ENCODER), INSTEAD("--image-*", "leave it out: the model's files say how pictures are read"), NOTHING("--enable-multimodal", FLAG, SEES),
    NOTHING("--no-mmproj", FLAG, SEES), NOTHING("--limit-mm-per-prompt", ONE, "--max-body-bytes and --max-model-len bound pictures"), NOTHING("--language-model-only", FLAG, SEES),
    INSTEAD("--embedding*", EMBEDDINGS), INSTEAD("--rerank*", EMBEDDINGS), INSTEAD("--is-embedding", EMBEDDINGS),
    SAME("-md", "draft-model"), SAME("--model-draft", "draft-model"), SAME("--spec-draft-model", "draft-model"), SAME("--speculative-draft-model-path", "draft-model"), SAME("--speculative-draft-model", "draft-model"),
    INSTEAD("--draft*", DRAFTS ": leave it out"), INSTEAD("--spec-*", DRAFTS ": leave it out"), NOTHING("--speculative-*", ONE, DRAFTS),
    INSTEAD("--models-preset", "use --config FILE, with a section for each model"), INSTEAD("--models-max", "use --models-memory"), NOTHING("--models-autoload", FLAG, ALWAYS),
    SAME("--sleep-idle-seconds", "model-idle"),
    /* devices */
    NOTHING("-ngl", ONE, WHOLE_DEVICE), NOTHING("--gpu-layers", ONE, WHOLE_DEVICE), NOTHING("--n-gpu-layers", ONE, WHOLE_DEVICE),
    INSTEAD("-dev", "use --device auto, cpu or cuda"), INSTEAD("--list-devices", "use nvidia-smi; the ready line names the backend"),
    INSTEAD("-mg", GPUS), INSTEAD("--main-gpu", GPUS), INSTEAD("-ts", GPUS), INSTEAD("--tensor-split", GPUS), INSTEAD("-sm", GPUS), INSTEAD("--split-mode", GPUS), INSTEAD("--base-gpu-id", GPUS),
    SAME("-tp", "tensor-parallel-size"), SAME("--tp", "tensor-parallel-size"), SAME("--tp-size", "tensor-parallel-size"),
    SAME("-dp", "data-parallel-size"), SAME("--dp", "data-parallel-size"), SAME("--dp-size", "data-parallel-size"),
    INSTEAD("-pp", GPUS), INSTEAD("--pp-size", GPUS), INSTEAD("--pipeline-parallel-size", GPUS),
    INSTEAD("--nnodes", "start one daemon on each machine: docs/SCALING.md"), INSTEAD("--node-rank", "start one daemon on each machine: docs/SCALING.md"),
    INSTEAD("--rpc", "start one daemon on each machine: docs/SCALING.md"), NOTHING("--distributed-executor-backend", ONE, "ranks are threads"),
    INSTEAD("-ot", WHOLE_DEVICE ": leave it out"), INSTEAD("--override-tensor", WHOLE_DEVICE ": leave it out"), INSTEAD("--cpu-offload-gb", WHOLE_DEVICE ": leave it out"),
    INSTEAD("-cmoe", WHOLE_DEVICE ": leave it out"), INSTEAD("--cpu-moe", WHOLE_DEVICE ": leave it out"), INSTEAD("-ncmoe", WHOLE_DEVICE ": leave it out"), INSTEAD("--n-cpu-moe", WHOLE_DEVICE ": leave it out"),
    SAME("-t", "threads"), NOTHING("-tb", ONE, "--threads are used for prompts and answers"), NOTHING("--threads-batch", ONE, "--threads are used for prompts and answers"),
    NOTHING("--threads-http", ONE, "one thread serves all connections"), INSTEAD("--cpu-mask", "use taskset"), INSTEAD("--cpu-range", "use taskset"), INSTEAD("--cpu-strict", "use taskset"), INSTEAD("-C", "use taskset"),
    INSTEAD("--numa", "use numactl"), INSTEAD("--prio", "use nice"), NOTHING("--poll", ONE, "threads that wait sleep"),
    NOTHING("--mlock", FLAG, "weights are copied to memory of the process"), NOTHING("--mmap", FLAG, "weights are copied to memory of the process"),
    NOTHING("--no-mmap", FLAG, "weights are copied to memory of the process"), NOTHING("--no-repack", FLAG, "weights have one form"), NOTHING("--repack", FLAG, ALWAYS),
    NOTHING("-fa", WORD, ALWAYS), NOTHING("--flash-attn", WORD, ALWAYS), NOTHING("--attention-backend", ONE, "the device decides: --cpu-path"),
    NOTHING("--enforce-eager", FLAG, "keepd compiles nothing at run time"), NOTHING("--disable-cuda-graph", FLAG, "keepd compiles nothing at run time"), NOTHING("--enable-torch-compile", FLAG, "keepd compiles nothing at run time"),
    NOTHING("-O", ONE, "keepd compiles nothing at run time"), NOTHING("--compilation-config", ONE, "keepd compiles nothing at run time"),
    NOTHING("--warmup", FLAG, "keepd needs none"), NOTHING("--no-warmup", FLAG, "keepd needs none"), NOTHING("--skip-server-warmup", FLAG, "keepd needs none"), NOTHING("--check-tensors", FLAG, "a load checks what it reads"),
    NOTHING("-fit", WORD, "sizes that are not given are chosen by what is free"), NOTHING("--fit", WORD, "sizes that are not given are chosen by what is free"),
    /* the cache */
    SAME("--kv-cache-dtype", "kv-dtype"), INSTEAD("-ctk", "use --kv-dtype q8, q4, fp8 or bf16, for keys and values"), INSTEAD("-ctv", "use --kv-dtype q8, q4, fp8 or bf16, for keys and values"),
    INSTEAD("--cache-type-k", "use --kv-dtype q8, q4, fp8 or bf16, for keys and values"), INSTEAD("--cache-type-v", "use --kv-dtype q8, q4, fp8 or bf16, for keys and values"),
    SAME("--kv-cache-memory-bytes", "kv-pool-bytes"), SAME("--kv-cache-memory", "kv-pool-bytes"),
    INSTEAD("--gpu-memory-utilization", POOL), INSTEAD("--mem-fraction-static", POOL), INSTEAD("--max-total-tokens", POOL), INSTEAD("--num-gpu-blocks-override", POOL),
    INSTEAD("-cram", POOL), INSTEAD("--cache-ram", POOL), NOTHING("--swap-space", ONE, "conversations that must leave memory go to --state-dir"),
    NOTHING("--block-size", ONE, "pages have one size"), NOTHING("--page-size", ONE, "pages have one size"),
    NOTHING("--enable-prefix-caching", FLAG, ALWAYS), NOTHING("--cache-prompt", FLAG, ALWAYS), NOTHING("--cache-reuse", ONE, "keepd reuses what matches from the beginning"),
    INSTEAD("--no-enable-prefix-caching", "use --max-conversations 0"), INSTEAD("--disable-radix-cache", "use --max-conversations 0"), INSTEAD("--no-cache-prompt", "use --max-conversations 0"),
    NOTHING("--radix-eviction-policy", ONE, "the conversation that was used least recently gives way first"),
    SET("--context-shift", "kv-overflow", "shift"), SET("--no-context-shift", "kv-overflow", "error"), INSTEAD("--keep", "leave it out: requests give kv.sinks"),
    INSTEAD("--slot-save-path", "use --state-dir DIR"), NOTHING("-kvu", FLAG, ALWAYS), NOTHING("--kv-unified", FLAG, ALWAYS), NOTHING("--swa-full", FLAG, "policy full keeps what windows see"),
    NOTHING("--ctx-checkpoints", ONE, "checkpoints are made where they help"), NOTHING("--swa-checkpoints", ONE, "checkpoints are made where they help"),
    NOTHING("-kvo", FLAG, WHOLE_DEVICE), NOTHING("--kv-offload", FLAG, WHOLE_DEVICE), NOTHING("-nkvo", FLAG, WHOLE_DEVICE), NOTHING("--no-kv-offload", FLAG, WHOLE_DEVICE), NOTHING("-dt", ONE, "pages need no defragmentation"), NOTHING("--defrag-thold", ONE, "pages need no defragmentation"),
    /* scheduling */
    SAME("-np", "max-num-seqs"), SAME("--parallel", "max-num-seqs"), SAME("--max-running-requests", "max-num-seqs"), SAME("--max-queued-requests", "max-queue"),
    SAME("-b", "max-num-batched-tokens"), SAME("--batch-size", "max-num-batched-tokens"), SAME("--max-prefill-tokens", "max-num-batched-tokens"),
    NOTHING("-ub", ONE, "--max-num-batched-tokens is the size of a step"), NOTHING("--ubatch-size", ONE, "--max-num-batched-tokens is the size of a step"), NOTHING("--chunked-prefill-size", ONE, "--step-stretch divides prompts"),
    NOTHING("--enable-chunked-prefill", FLAG, ALWAYS), NOTHING("--no-enable-chunked-prefill", FLAG, "--step-stretch 0 does not divide prompts"), NOTHING("-cb", FLAG, ALWAYS), NOTHING("--cont-batching", FLAG, ALWAYS), NOTHING("--async-scheduling", FLAG, "keepd schedules between steps"),
    NOTHING("--schedule-policy", ONE, "clients share fairly"), NOTHING("--scheduling-policy", ONE, "clients share fairly"), NOTHING("--schedule-conservativeness", ONE, "a running answer is never stopped for memory"),
    /* answers */
    SAME("-n", "default-max-tokens"), SAME("--predict", "default-max-tokens"), SAME("--n-predict", "default-max-tokens"),
    SAME("-s", "seed"), SAME("--random-seed", "seed"), SAME("--temp", "temperature"), SAME("--repeat-penalty", "repetition-penalty"),
    INSTEAD("--presence-penalty", IN_REQUESTS), INSTEAD("--frequency-penalty", IN_REQUESTS), INSTEAD("--ignore-eos", IN_REQUESTS), INSTEAD("-l", IN_REQUESTS), INSTEAD("--logit-bias", IN_REQUESTS),
    INSTEAD("--grammar*", IN_REQUESTS), INSTEAD("-j", IN_REQUESTS), INSTEAD("--json-schema*", IN_REQUESTS), INSTEAD("--samplers", NO_SAMPLER), INSTEAD("--sampling-seq", NO_SAMPLER),
    INSTEAD("--top-n*", NO_SAMPLER), INSTEAD("--xtc-*", IN_REQUESTS), INSTEAD("--typical*", NO_SAMPLER), INSTEAD("--dry-*", IN_REQUESTS), INSTEAD("--dynatemp-*", NO_SAMPLER), INSTEAD("--mirostat*", NO_SAMPLER), INSTEAD("--adaptive-*", NO_SAMPLER),
    INSTEAD("--repeat-last-n", NO_SAMPLER), INSTEAD("--generation-config", "use --temperature, --top-p, --top-k, --min-p and --repetition-penalty"),
    INSTEAD("--override-generation-config", "use --temperature, --top-p, --top-k, --min-p and --repetition-penalty"), INSTEAD("--sampling-defaults", "use --temperature, --top-p, --top-k, --min-p and --repetition-penalty"),
    INSTEAD("--reasoning-budget", IN_REQUESTS), INSTEAD("-rea", IN_REQUESTS), INSTEAD("--reasoning", IN_REQUESTS), INSTEAD("--reasoning-effort", IN_REQUESTS),
    SAME("--reasoning-format", "reasoning-parser"), NOTHING("--enable-reasoning", FLAG, ALWAYS), NOTHING("--enable-auto-tool-choice", FLAG, ALWAYS), NOTHING("--response-role", ONE, "the role is assistant"),
    NOTHING("--guided-decoding-backend", ONE, "there is one"), NOTHING("--structured-outputs-config", ONE, "there is one"), NOTHING("--grammar-backend", ONE, "there is one"),
    INSTEAD("-p", "use keepd chat"), INSTEAD("--prompt", "use keepd chat"), INSTEAD("-i", "use keepd chat"), INSTEAD("-sys", "use keepd chat --system TEXT"), INSTEAD("--system-prompt", "use keepd chat --system TEXT"),
    /* the server */
    SAME("--ssl-keyfile", "tls-key"), SAME("--ssl-key-file", "tls-key"), SAME("--ssl-certfile", "tls-cert"), SAME("--ssl-cert-file", "tls-cert"), SAME("--uds", "unix-socket"),
    INSTEAD("--ssl-ca-certs", "leave it out: keepd asks clients for keys, not for certificates"), INSTEAD("--allowed-origins", "use --cors-origin, once for each origin"), INSTEAD("--cors-*", "use --cors-origin, once for each origin"),
    INSTEAD("--root-path", "have the proxy take the prefix off"), INSTEAD("--api-prefix", "have the proxy take the prefix off"), INSTEAD("--fastapi-root-path", "have the proxy take the prefix off"),
    INSTEAD("-to", "use --request-timeout SECONDS"), INSTEAD("--timeout", "use --request-timeout SECONDS"), INSTEAD("--reuse-port", "start each daemon on its own port, behind a proxy"),
    INSTEAD("--path", "serve files with a web server"), SET("--no-webui", "no-ui", "true"), SET("--enable-force-include-usage", "force-include-usage", "true"), INSTEAD("--return-tokens-as-token-ids", IN_REQUESTS), NOTHING("--webui", FLAG, ALWAYS), NOTHING("--ui", FLAG, ALWAYS),
    NOTHING("--metrics", FLAG, ALWAYS), NOTHING("--enable-metrics", FLAG, ALWAYS), NOTHING("--slots", FLAG, ALWAYS), NOTHING("--no-slots", FLAG, "requests that read state need the API key"), NOTHING("--props", FLAG, "GET /props is always there"),
    NOTHING("--enable-cache-report", FLAG, ALWAYS), NOTHING("--enable-prompt-tokens-details", FLAG, ALWAYS), NOTHING("--enable-server-load-tracking", FLAG, ALWAYS), NOTHING("--sse-ping-interval", ONE, "streams without events get a comment every 15 s"),
    SAME("--otlp-traces-endpoint", "otlp-endpoint"), NOTHING("--enable-trace", FLAG, "--otlp-endpoint URL sends traces"), NOTHING("--api-server-count", ONE, "one thread serves all connections"), NOTHING("--disable-frontend-multiprocessing", FLAG, "there is one process"),
    NOTHING("--disable-log-requests", FLAG, "the log has no text of requests"), NOTHING("--no-enable-log-requests", FLAG, "the log has no text of requests"), NOTHING("--enable-log-requests", FLAG, "each request has a line"), NOTHING("--log-requests", FLAG, "each request has a line"), NOTHING("--disable-log-stats", FLAG, "numbers are in /metrics"),
    SET("-v", "log-level", "debug"), SET("--verbose", "log-level", "debug"), SET("--log-verbose", "log-level", "debug"), SET("--log-disable", "log-level", "error"), SET("--log-jsonl", "log-format", "json"), SAME("--uvicorn-log-level", "log-level"), NOTHING("--log-level-http", ONE, "--log-level is for all"),
    INSTEAD("-lv", "use --log-level"), INSTEAD("--verbosity", "use --log-level"), INSTEAD("--log-verbosity", "use --log-level"), INSTEAD("--log-file", "use 2>FILE: the log goes to stderr"), NOTHING("--log-prefix", FLAG, ALWAYS), NOTHING("--log-timestamps", FLAG, ALWAYS), NOTHING("--log-colors", WORD, "the log has no colours"),
    INSTEAD("--tools", "leave it out: keepd runs no tools"), INSTEAD("--tool-server", "leave it out: keepd runs no tools"), INSTEAD("--mcp-*", "leave it out: keepd runs no tools"), INSTEAD("--agent", "leave it out: keepd runs no tools"),
    SET("-V", "version", "true"), SET("--usage", "help", "true"), SET("-help", "help", "true"),
    /* clang-format on */
};

#define FOUND_BY_FILE "the format of a quantised model is read from its files"
#define FOUND_BY_TEXT "reasoning is found by the model's template"

static const struct foreign_word words[] = {
    {"kv-dtype", "bfloat16", "bf16", NULL},
    {"kv-dtype", "float32", "f32", NULL},
    {"kv-dtype", "fp8_e5m2", "fp8", "fp8 is E4M3 here"},
    {"log-level", "warning", "warn", NULL},
    {"log-level", "critical", "error", NULL},
    {"log-level", "trace", "debug", NULL},
    {"device", "gpu", "cuda", NULL},
    {"tool-call-parser", "llama3_json", "llama3", NULL},
    {"tool-call-parser", "qwen", "hermes", NULL},
    {"tool-call-parser", "qwen25", "hermes", NULL},
    {"tool-call-parser", "qwen3_xml", "qwen3_coder", NULL},
    {"tool-call-parser", "openai", "harmony", NULL},
    {"tool-call-parser", "cohere_command3", "command", NULL},
    {"tool-call-parser", "step3p5", "qwen3_coder", NULL},
    {"tool-call-parser", "granite4", "hermes", NULL},
    {"tool-call-parser", "gpt-oss", "harmony", NULL},
    {"reasoning-parser", "deepseek", "auto", FOUND_BY_TEXT},
    {"reasoning-parser", "deepseek-r1", "auto", FOUND_BY_TEXT},
    {"reasoning-parser", "deepseek_r1", "auto", FOUND_BY_TEXT},
    {"reasoning-parser", "qwen3", "auto", FOUND_BY_TEXT},
    {"reasoning-parser", "qwen3-thinking", "auto", FOUND_BY_TEXT},
    {"reasoning-parser", "glm45", "auto", FOUND_BY_TEXT},
    {"reasoning-parser", "granite", "auto", FOUND_BY_TEXT},
    {"reasoning-parser", "mistral", "auto", FOUND_BY_TEXT},
    {"reasoning-parser", "gpt-oss", "auto", FOUND_BY_TEXT},
    {"reasoning-parser", "openai_gptoss", "auto", FOUND_BY_TEXT},
    {"quantization", "awq", "none", FOUND_BY_FILE},
    {"quantization", "awq_marlin", "none", FOUND_BY_FILE},
    {"quantization", "gptq", "none", FOUND_BY_FILE},
    {"quantization", "gptq_marlin", "none", FOUND_BY_FILE},
    {"quantization", "gguf", "none", FOUND_BY_FILE},
    {"quantization", "mxfp4", "none", FOUND_BY_FILE},
    {"quantization", "compressed-tensors", "none", FOUND_BY_FILE},
};

static const struct {
    const char *name, *text;
} commands[] = {
    {"run", "use keepd serve MODEL, then keepd chat in another terminal"},
    {"download", "use keepd pull OWNER/NAME:QUANTISATION"},
    {"list", "use curl http://127.0.0.1:8080/v1/models; hf cache ls lists what was fetched"},
    {"ls", "use curl http://127.0.0.1:8080/v1/models; hf cache ls lists what was fetched"},
    {"ps", "use curl http://127.0.0.1:8080/v1/models; keepd keeps no models of its own"},
    {"show", "use keepd --inspect MODEL"},
    {"inspect", "use keepd --inspect MODEL"},
    {"check", "use keepd --model MODEL --check-config"},
    {"quantize", "use keepd --model MODEL --quantization q4 --quantize-to PATH"},
    {"create", "use keepd --model MODEL --quantization q4 --quantize-to PATH"},
    {"complete", "use keepd chat, or curl http://127.0.0.1:8080/v1/completions"},
    {"stop", "press Ctrl-C in its terminal, or use systemctl stop keepd"},
    {"rm", "delete the model's files, or use hf cache rm for what was fetched"},
};

#define COUNT(table) (sizeof(table) / sizeof *(table))

static bool equal_names(const char *name, const char *text, size_t size) {
    for (size_t i = 0; i < size; i++)
        if (name[i] != (text[i] == '_' ? '-' : text[i])) return false;
    return true;
}

const struct foreign *foreign_find(const char *name, size_t size) {
    for (size_t i = 0; i < COUNT(rows); i++) {
        size_t all = strlen(rows[i].name);
        bool begins = rows[i].name[all - 1] == '*';
        if (begins ? size < all - 1 : size != all) continue;
        if (equal_names(rows[i].name, name, begins ? all - 1 : all)) return &rows[i];
    }
    return NULL;
}

const struct foreign_word *foreign_word_find(const char *option, const char *word) {
    for (size_t i = 0; i < COUNT(words); i++)
        if (strcmp(words[i].option, option) == 0 && strcmp(words[i].word, word) == 0)
            return &words[i];
    return NULL;
}

bool foreign_is_word(const char *text) {
    static const char *const known[] = {"on", "off", "auto", "true", "false", "0", "1"};
    for (size_t i = 0; text && i < COUNT(known); i++)
        if (strcmp(text, known[i]) == 0) return true;
    return false;
}

const char *foreign_command(const char *name) {
    for (size_t i = 0; i < COUNT(commands); i++)
        if (strcmp(commands[i].name, name) == 0) return commands[i].text;
    return NULL;
}
