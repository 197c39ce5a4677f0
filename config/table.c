/* The options: a row for each. Every row is a line of --help, a flag, a variable of the environment
 * and a name in the configuration file. */
#include "config/table.h"

#include <stdint.h>

#include "paging/names.h"

#define MANY INT32_MAX

/* A row that has only a help text is a heading. */
const struct option config_options[] = {
    /* clang-format off */
    {.help = "Model"},
    {"model", LIST, AT(model_texts), 1, 0, NULL, "MODEL", 0,
     "Model directory in Hugging Face format (config.json, tokenizer files, safetensors "
     "weights), or a GGUF file, the first of a split one. Or hf:OWNER/NAME:QUANTISATION, a model of "
     "the Hugging Face Hub, which is fetched into its cache where it is not there (keepd pull). "
     "NAME=MODEL gives it this name, NAME,ALIAS=MODEL several. May be given several times: then "
     "each model is loaded when a request names it. A section [NAME] of the configuration file with "
     "model = MODEL also names one, and has options of its own."},
    {"models-dir", TEXT, AT(models_dir), 1, 0, NULL, "DIR", 0,
     "Folder of models: its GGUF files and its directories with config.json, each by its name."},
    {"models-memory", BYTES, AT(server.models_memory), 0, INT64_MAX, "0", "BYTES", 0,
     "Memory that all loaded models may take together: weights, caches and buffers, as --inspect "
     "says. A model that needs room gets it from those that were used least recently; with "
     "--state-dir their conversations stay. 0: with several models three quarters of the memory "
     "that is free at the start, of their GPUs or of the host, otherwise any."},
    {"pin", LIST, AT(pins), 1, 0, NULL, "NAME", 0,
     "Model that is loaded at the start and stays. May be given several times."},
    {"model-idle", INT, AT(server.model_idle), 0, 31536000, "0", "SECONDS", 0,
     "Unload a model that no request has used for so long. 0: never."},
    {"model-residence", INT, AT(server.model_residence), 0, 86400, "5", "SECONDS", 0,
     "Time that a loaded model stays at least before it makes room for another one."},
    {"model-loads", INT, AT(server.model_loads), 0, 1000000, "30", "N", 0,
     "Loads of models in a minute. Beyond it, requests for models that are not loaded are answered "
     "with 503 and the time after which to come again. 0: no limit."},
    {"served-model-name", TEXT, AT(model.names), 1, 0, NULL, "NAME", 0,
     "Model name used by the API. Further accepted names may follow, separated by commas. "
     "Default: the name of the model directory or file, or what follows hf:."},
    {"gates", TEXT, AT(engine.gates), 0, 0, NULL, "FILE", 0,
     "Retention gate weights. Default: gates.safetensors in the model's directory, or "
     "NAME.gates.safetensors beside NAME.gguf; otherwise those that were fitted to this model "
     "before (--gates-cache). Empty: no gates. A file that names no base model is used only if it "
     "is given here."},
    {"fit", ENUM, AT(fit), 0, 0, "auto", "auto|never", 0,
     "auto: where the configuration asks for a policy that needs gates (by --kv-policy, or by "
     "--kv-budget) and none are found, fit them to the model before serving: minutes, once, then "
     "they are found in --gates-cache. Where that fails, keepd starts as with never. never: start "
     "with what there is."},
    {"gates-cache", TEXT, AT(engine.gates_cache), 0, 0, NULL, "DIR", 0,
     "Directory of gates that were fitted on this machine, by digests of their models. Default: "
     "gates in $CACHE_DIRECTORY (systemd), else keepd/gates in $XDG_CACHE_HOME or ~/.cache. Empty: "
     "none."},
    {"lora", LIST, AT(model.adapters), 1, 0, NULL, "NAME=PATH", 0,
     "LoRA adapter of the model: a directory as PEFT writes it, or a GGUF file. Requests name it as "
     "their model, by NAME or by MODEL:NAME. May be given several times; with several models, in the "
     "section of one of them."},
    {"lora-dir", TEXT, AT(engine.adapter_dir), 1, 0, NULL, "DIR", 0,
     "Folder from which POST /v1/load_lora_adapter may load adapters while keepd runs. Unset: "
     "adapters are loaded and unloaded by no request."},
    {"max-loras", INT, AT(engine.max_adapters), 1, 64, "16", "N", 0,
     "Maximum number of adapters that are loaded at the same time."},
    {"lora-memory", BYTES, AT(engine.adapter_bytes), 1, INT64_MAX, "1G", "BYTES", 0,
     "Memory that the numbers of all loaded adapters may take together, on each replica: 4 bytes "
     "for each."},
    {"max-model-len", INT, AT(engine.max_model_len), 0, MANY, "0", "N", 0,
     "Positions that prompt and answer may use together, in tokens; --kv-overflow says what happens "
     "to longer texts. 0: the model's own limit."},
    {"quantization", CHOICE, AT(engine.quantization), 0, 0, "none", "none|fp8|q8|q4", 0,
     "fp8: convert the layers' matrices to 8-bit floating point (E4M3, one scale per output) "
     "while loading, half the memory of bf16; embeddings, LM head, norms and gates are not "
     "converted. On a GPU, activations are also rounded to fp8, row by row. q8, q4: convert "
     "matrices to blocks of 8-bit or 4-bit numbers, 8.5 or about 5.4 bits per number; embeddings "
     "and LM head to 8 bits. Quantised matrices of a GGUF file stay what they are."},
    {"random-weights", FLAG, AT(engine.random_weights), 0, 0, "false", NULL, 0,
     "Read only config.json from the model directory and generate random weights, for speed "
     "measurements."},

    {.help = "Server"},
    {"host", TEXT, AT(server.host), 1, 0, "127.0.0.1", "HOST", 0,
     "Address to listen on. With systemd socket activation the socket passed by systemd is "
     "used instead."},
    {"port", INT, AT(server.port), 0, 65535, "8080", "N", 0,
     "TCP port. 0: any free port, printed in the ready line."},
    {"api-key", LIST, AT(server.now.api_keys), 1, 0, NULL, "KEY", SECRET | RELOADABLE,
     "API key that requests must send as a bearer token. May be given several times; every key "
     "is accepted. Default: no key is required."},
    {"api-key-file", TEXT, AT(server.now.api_key_file), 1, 0, NULL, "FILE", RELOADABLE,
     "File with one API key per line, accepted in addition to those of --api-key. Settings may "
     "follow a key: name=TEXT weight=N pages=N pins=N requests=N. Read again on SIGHUP."},
    {"unix-socket", TEXT, AT(server.unix_socket), 1, 0, NULL, "PATH", 0,
     "Listen on this Unix socket instead of TCP."},
    {"unix-socket-mode", TEXT, AT(server.unix_socket_mode), 1, 0, "0660", "MODE", 0,
     "Permissions of the Unix socket, in octal."},
    {"tls-cert", TEXT, AT(server.now.tls_cert), 1, 0, NULL, "FILE", RELOADABLE,
     "Certificate chain in PEM format; enables HTTPS. Requires --tls-key. Both files are read "
     "again on SIGHUP."},
    {"tls-key", TEXT, AT(server.now.tls_key), 1, 0, NULL, "FILE", RELOADABLE,
     "Private key of the certificate, in PEM format."},
    {"allowed-host", LIST, AT(server.allowed_hosts), 1, 0, NULL, "NAME", 0,
     "Host name accepted in the Host header in addition to localhost, and to the names by which "
     "containers reach their host (host.docker.internal), while keepd listens on a loopback "
     "address (protection against DNS rebinding). On other addresses the header is checked only "
     "if this option is given. May be given several times."},
    {"cors-origin", LIST, AT(server.cors_origins), 1, 0, NULL, "ORIGIN", 0,
     "Origin whose web pages may read answers (https://chat.example), localhost for the pages of "
     "this machine on any port, or * for all. May be given several times. Default: no other "
     "origin."},
    {"allow-image-urls", LIST, AT(server.image_hosts), 1, 0, NULL, "HOST", 0,
     "Host from which pictures of requests with http: and https: addresses are fetched: NAME, or "
     "*.NAME for all names that end so, either with :PORT. Redirects lead to such hosts alone, and "
     "no address is used that is not public, unless it is given here itself with its port "
     "(127.0.0.1:8000). Needs libcurl. May be given several times. Default: nothing is fetched."},
    {"max-connections", INT, AT(server.max_connections), 1, 1000000, "2048", "N", 0,
     "Maximum number of open client connections."},
    {"max-connections-per-client", INT, AT(server.max_connections_per_client), 0, 1000000, "0", "N", 0,
     "Maximum number of open connections from one address; further connections are closed at "
     "once. 0: no limit."},
    {"max-header-bytes", BYTES, AT(server.max_header_bytes), 1024, 1048576, "16K", "BYTES", 0,
     "Maximum size of request line and headers together. Larger requests are answered with "
     "431."},
    {"max-body-bytes", BYTES, AT(server.max_body_bytes), 1024, MANY, "8M", "BYTES", 0,
     "Maximum size of a request body."},
    {"strict-params", FLAG, AT(server.strict_params), 0, 0, "false", NULL, 0,
     "Reject requests with unknown fields instead of ignoring the fields."},
    {"force-include-usage", FLAG, AT(server.include_usage), 0, 0, "false", NULL, 0,
     "End every stream in OpenAI's form with its usage, as if requests had asked for it with "
     "stream_options.include_usage: for gateways that count tokens."},
    {"no-ui", FLAG, AT(server.no_ui), 0, 0, "false", NULL, 0,
     "Do not serve the page at /, on which people chat and see what the cache keeps."},
    {"otlp-endpoint", TEXT, AT(server.otlp_endpoint), 1, 0, NULL, "URL", 0,
     "Send a span of each request to this OpenTelemetry collector, by OTLP over HTTP: "
     "http://HOST:4318, to which /v1/traces is added. Needs libcurl."},
    {"chat-template", TEXT, AT(engine.chat_template), 0, 0, NULL, "FILE", 0,
     "Chat template (Jinja) in place of the model's: a file, or chatml, the form with <|im_start|> "
     "and <|im_end|>. Default: the model's."},
    {"reasoning-parser", ENUM, AT(reasoning_parser), 0, 0, "auto", "auto|none", 0,
     "auto: text between <think> tags is returned as reasoning_content. none: answers are "
     "returned unchanged."},
    {"tool-call-parser", CHOICE, AT(model.tool_call_parser), 0, 0, "auto",
     "auto|hermes|llama3|mistral|qwen3_coder|seed_oss|glm45|glm47|minimax_m2|"
     "minimax_m3|deepseek_v3|deepseek_v31|deepseek_v32|kimi_k2|granite|command|functionary|lfm2|"
     "gemma4|harmony|none", 0,
     "Format of the model's tool calls, as in the API's page: JSON between tags (hermes: Qwen, "
     "Hermes; granite, command, deepseek_v3, kimi_k2, functionary), tags for each argument "
     "(qwen3_coder, seed_oss, glm45, minimax_m2, deepseek_v32), literals (lfm2: Python's, gemma4: "
     "its own), channels (harmony: gpt-oss), a list after [TOOL_CALLS] (mistral) or a bare JSON "
     "object (llama3: Llama 3.x). auto: detected from the chat template. none: requests that allow "
     "tool calls are rejected."},
    {"request-timeout", INT, AT(server.now.request_timeout), 0, 86400, "0", "SECONDS", RELOADABLE,
     "Maximum duration of a request, measured from its arrival; a request that takes longer "
     "ends with 408. A request may set a lower limit with the header X-Request-Timeout. 0: no "
     "limit."},
    {"rate-limit", INT, AT(server.now.rate_limit), 0, 1000000, "0", "N", RELOADABLE,
     "Requests per minute and API key (without keys: of all clients together). Further "
     "requests are answered with 429. 0: no limit."},
    {"drain-seconds", INT, AT(server.now.drain_seconds), 0, 86400, "30", "N", RELOADABLE,
     "Time that running answers have to finish after SIGTERM."},

    {.help = "Cache"},
    {"kv-policy", TEXT, AT(engine.kv_policy), 1, 0, "auto", "POLICY", 0,
     "Eviction policy, which decides what a sequence over its budget keeps: " POLICY_NAMES ". "
     "auto: global if the model has gates, otherwise full. Gates of --gates-cache count only where "
     "--kv-budget is given."},
    {"kv-budget", INT, AT(engine.kv_budget), 1, MANY, "1024", "N", 0,
     "Cache entries kept per layer and head, on average. A request may set another budget."},
    {"kv-budget-max", INT, AT(engine.kv_budget_max), 0, MANY, "0", "N", 0,
     "Maximum budget that a request may set. 0: no limit."},
    {"kv-buffer", INT, AT(engine.kv_buffer), 0, MANY, "128", "N", 0,
     "Tokens by which a sequence may exceed its budget before the next eviction."},
    {"kv-chunk", INT, AT(engine.kv_chunk), 1, MANY, "512", "N", 0,
     "Prompt tokens between two evictions while a prompt is processed."},
    {"kv-overflow", ENUM, AT(engine.kv_overflow), 0, 0, "auto", "auto|error|shift", 0,
     "What happens to a text that needs more positions than the model has. error: the request is "
     "refused. shift: kept entries get new places, closer together, so that the text may go on; "
     "the default policy must be able to do this. auto: shift for requests whose policy and "
     "settings can, otherwise error; policy full cannot. A request may choose."},
    {"kv-pool-bytes", BYTES, AT(engine.kv_pool_bytes), 0, INT64_MAX, "0", "BYTES", 0,
     "Memory for the cache pages of each rank. 0: on a GPU, what remains after weights and "
     "working memory on the fullest device; on the CPU, enough for max-num-seqs, at most half "
     "of the free memory. The numbers of the tokens of retained conversations, 4 bytes each, "
     "count as part of it."},
    {"kv-dtype", CHOICE, AT(engine.kv_dtype), 0, 0, "auto", "auto|f32|bf16|fp8|fp8_e4m3|q8|q4", 0,
     "Number format of cached keys and values. auto: the format of the weights, bf16 for f16 "
     "weights. fp8 (fp8_e4m3): 8-bit E4M3, rounded to nearest, at most 448; holds twice as "
     "many entries as bf16 in the same memory. q8, q4: 8 or 4 bits and a factor for each rotated "
     "key or value; they hold 1.9 and 3.4 times as many entries as bf16. q4: on the CPU only."},

    {.help = "Engine"},
    {"pooling", CHOICE, AT(engine.pooling), 0, 0, "auto", "auto|last|mean|cls", 0,
     "How a text becomes the vector of /v1/embeddings: the output of its last token, of its first, "
     "or the mean over all tokens. auto: as the model's files say, otherwise last."},
    {"max-num-seqs", INT, AT(engine.max_num_seqs), 1, 65536, "64", "N", 0,
     "Maximum number of sequences that run at the same time."},
    {"max-num-batched-tokens", INT, AT(engine.max_num_batched_tokens), 1, 1048576, "2048", "N", 0,
     "Maximum number of tokens computed in one step, prompts and answers together."},
    {"step-stretch", INT, AT(engine.step_stretch), 0, 100000, "200", "PERCENT", 0,
     "Duration of a step in which prompts are read beside answers that are generated, in percent "
     "of a step without prompts. Smaller: answers flow more evenly; larger: prompts are read "
     "sooner. A step reads at least 32 prompt tokens, also with 1 to 100. 0: no limit but "
     "max-num-batched-tokens. Answers do not depend on it."},
    {"speculate", INT, AT(engine.drafts), 0, 15, "15", "N", 0,
     "Most tokens that are guessed for an answer in one step, from its prompt and its text so far. "
     "A step then gives as many tokens as were guessed rightly, and one more, from one reading of "
     "the weights. Answers are the same, bit by bit. How many are guessed depends on how often "
     "guesses were right and on how much longer a step with more rows takes. 0: none."},
    {"draft-model", TEXT, AT(engine.draft_model), 1, 0, NULL, "MODEL", 0,
     "A smaller model with the same tokenizer, a GGUF file, a directory or hf:OWNER/NAME, that "
     "guesses tokens where the text itself tells none. It takes memory for its weights and for a cache of its own, and a "
     "part of the time of each step; it is asked where its guesses make up for that. On the CPU, "
     "with one rank. Unset: the block that predicts further tokens (MTP) in the model's own files, "
     "if they have one; none: nothing but the text."},
    {"draft-tokens", INT, AT(engine.draft_tokens), 128, MANY, "1024", "N", 0,
     "Tokens that the draft model remembers of a text, at most. Its cache has room for as many "
     "texts as max-num-seqs, in an eighth of the free memory at most."},
    {"mmproj", TEXT, AT(engine.mmproj), 1, 0, NULL, "FILE", 0,
     "A GGUF file of type mmproj, with the encoder by which the model sees pictures (Idefics3, "
     "SmolVLM, Gemma 3, Qwen2.5-VL, Qwen3-VL, Qwen3.5). Unset: the encoder in the model's own directory, if it has "
     "one that keepd can use. On the CPU."},
    {"default-max-tokens", INT, AT(model.default_max_tokens), 0, MANY, "1024", "N", 0,
     "Maximum answer length of a chat request that sets none. 0: up to the end of the context. "
     "/v1/completions uses 16, as OpenAI does."},
    {"repetition-count", INT, AT(model.repetition_count), 0, 1000, "0", "N", 0,
     "An answer ends where it has said a block of 8 to 512 tokens so often, one behind the other "
     "(finish_reason \"repetition\"). 0 or 1: however often. A request's repetition_detection goes "
     "before it."},
    {"temperature", NUM, AT(sampling.temperature), 0, 2, NULL, "X", 0,
     "Temperature of requests that give none; 0: the likeliest token. This option and the next "
     "four take the place of the model's own settings (generation_config.json, or general.sampling "
     "in a GGUF file) and give way to a request's. Default: the model's, or 1."},
    {"top-p", NUM, AT(sampling.top_p), 0, 1, NULL, "X", 0,
     "Probability of the likeliest tokens among which is chosen. Default: the model's, or 1."},
    {"top-k", NUM, AT(sampling.top_k), 0, INT32_MAX, NULL, "N", WHOLE,
     "Number of likeliest tokens among which is chosen; 0: all. Default: the model's, or 0."},
    {"min-p", NUM, AT(sampling.min_p), 0, 1, NULL, "X", 0,
     "Least probability of a token, relative to the likeliest. Default: the model's, or 0."},
    {"repetition-penalty", NUM, AT(sampling.repetition), 0, 1000, NULL, "X", 0,
     "Factor by which tokens that are there already become less likely; 1: none. Default: the "
     "model's, or 1."},
    {"seed", INT, AT(model.seed), -1, INT64_MAX, "-1", "N", 0,
     "Seed of requests that give none, so that equal requests get equal answers. -1: a random "
     "seed for each of them."},
    {"max-queue", INT, AT(engine.max_queue), 1, 1048576, "1024", "N", 0,
     "Maximum number of waiting requests. Further requests are answered with 503."},
    {"max-queue-tokens", INT, AT(server.max_queue_tokens), 0, INT64_MAX, "1048576", "N", 0,
     "Maximum number of prompt tokens of all waiting requests together, reserved before a "
     "prompt is tokenized. Further requests are answered with 503. 0: no limit."},
    {"max-conversations", INT, AT(engine.max_conversations), 0, 1048576, "256", "N", 0,
     "Maximum number of conversations retained between turns."},
    {"max-choices", INT, AT(engine.max_choices), 0, 128, "0", "N", 0,
     "Maximum number of choices (n) of one request. 0: as many as may run at the same time, at "
     "most 128."},
    {"max-logprobs", INT, AT(engine.max_logprobs), 1, MANY, "20", "N", 0,
     "Maximum number of alternatives that a request may ask for with each token (top_logprobs, "
     "prompt_logprobs, n_probs). If it is at least the size of the vocabulary, requests may ask "
     "for all of it with -1; one answer then may be some hundred megabytes long."},
    {"state-dir", TEXT, AT(engine.state_dir), 1, 0, NULL, "DIR", 0,
     "Directory in which conversations with a budget are stored, so that this daemon or "
     "another one with the same model and gates can continue them after a restart. It holds a "
     "secret key; restrict access to it (mode 0700)."},
    {"state-bytes", BYTES, AT(engine.state_bytes), 0, INT64_MAX, "16G", "BYTES", 0,
     "Maximum size of all files in state-dir together; the least recently used file is deleted "
     "first."},
    {"state-idle", INT, AT(engine.state_idle_seconds), 0, 86400, "10", "SECONDS", 0,
     "Time after its last use at which a conversation is written to state-dir. Conversations "
     "are also written at shutdown and when their memory is needed."},
    {"data-parallel-size", INT, AT(engine.data_parallel_size), 1, 64, "1", "N", 0,
     "Number of replicas of the model in one server, each with its own GPU or an equal part of "
     "the threads. kv-pool-bytes, max-num-seqs, max-num-batched-tokens, max-queue and "
     "max-conversations apply to each replica; a conversation stays with its replica."},
    {"tensor-parallel-size", INT, AT(engine.tensor_parallel_size), 1, 8, "1", "N", 0,
     "Number of ranks over which each model is split: 1, 2, 4 or 8. Each rank holds a part of "
     "the weights and of the cache, on its own GPU or on CPU threads. On the CPU, answers are "
     "bitwise those of one rank."},
    {"kv-rank-cap", INT, AT(engine.kv_rank_cap), 0, 800, "0", "PERCENT", 0,
     "Maximum number of entries that one rank keeps of a conversation, for policies in which "
     "heads compete, in percent of an even distribution; 100 or more. 0: no maximum, so "
     "answers do not depend on the number of ranks."},
    {"threads", INT, AT(engine.threads), 0, 1024, "0", "N", 0,
     "Number of compute threads of all replicas. 0: one for each core that the process may use (by "
     "its affinity and its CPU quota), and fewer while other programs compute, if that is faster."},
    {"device", CHOICE, AT(engine.device), 0, 0, "auto", "auto|cpu|cuda", 0,
     "Device that computes. auto: a GPU if this build and this machine have one."},
    {"cpu-path", CHOICE, AT(engine.cpu_path), 0, 0, "auto", "auto|reference|portable|neon|avx2|avx512|amx", 0,
     "CPU kernels to use. auto: the fastest that this machine can run."},
    {"cpu-activations", CHOICE, AT(engine.cpu_activations), 0, 0, "int8", "auto|int8|int16|bf16|f32", 0,
     "How the CPU rounds activations before it multiplies them with weights in 8-bit and 4-bit "
     "blocks (quantised GGUF files). int8: to 8 bits, with one scale per 32 numbers, and the "
     "largest numbers to 15 bits; the fastest. int16: to 16 bits. auto: int8 with 4-bit blocks "
     "and int16 with 8-bit blocks. bf16: to bf16, on processors with AMX, or with AVX512_BF16, "
     "where blocks stay as with int16. f32: not at all; slow, and exactly the products of the "
     "numbers in the file. With int8, auto and bf16, processors with AVX512_BF16 and without AMX "
     "also round activations to bf16 for weights in bf16 and fp8, and queries and attention weights "
     "for a cache in bf16."},

    {.help = "General"},
    {"config", TEXT, AT(config_file), 1, 0, NULL, "FILE", NOT_IN_FILE,
     "Configuration file with lines of the form `name = value`; the names are the options "
     "without the dashes."},
    {"log-level", ENUM, AT(log_level), 0, 0, "info", "error|warn|info|debug", RELOADABLE,
     "Level of detail of the log."},
    {"log-format", ENUM, AT(log_format), 0, 0, "plain", "plain|json", RELOADABLE,
     "Format of log lines. json: one object per line."},
    {"check-config", FLAG, AT(check_config), 0, 0, NULL, NULL, COMMAND_LINE,
     "Check everything that a start would reject (options, files, the model's tensors) without "
     "loading weights, print the values in force and exit."},
    {"inspect", TEXT, AT(inspect), 1, 0, NULL, "MODEL", COMMAND_LINE,
     "Print what keepd understands of this model (family, shape, types, stop tokens, template, "
     "memory) and what a start would reject, without loading weights, and exit. Takes the place "
     "of --model."},
    {"quantize-to", TEXT, AT(quantize_to), 1, 0, NULL, "PATH", COMMAND_LINE,
     "Round the model's matrices as --quantization (q8, q4) says, write the model to PATH and exit. "
     "A directory becomes a directory, with tokenizer, chat template and gates; a GGUF file becomes "
     "one GGUF file. keepd loads PATH faster, and unless rounding is calibrated with the same "
     "numbers as with --quantization."},
    {"quantize-calibrate", INT, AT(engine.calibrate), 0, 1000000, "4096", "N", COMMAND_LINE,
     "With --quantize-to and q4: have the model write N tokens first, and round by what these and "
     "as many random tokens show of each matrix's inputs. That comes much closer to the model; it "
     "takes minutes, and memory for the model as it is. 0: round by the weights alone."},
    {"version", FLAG, AT(version), 0, 0, NULL, NULL, COMMAND_LINE,
     "Print the version and exit."},
    {"completion", CHOICE, AT(completion), 0, 0, NULL, "bash|zsh|fish", COMMAND_LINE,
     "Print a completion script for this shell and exit."},
    {"man", FLAG, AT(man), 0, 0, NULL, NULL, COMMAND_LINE,
     "Print the manual page (`keepd --man | man -l -`) and exit."},
    {"help", FLAG, AT(help), 0, 0, NULL, NULL, COMMAND_LINE,
     "Print this text and exit."},
    /* clang-format on */
};

const size_t config_option_count = sizeof config_options / sizeof *config_options;
_Static_assert(sizeof config_options / sizeof *config_options <= CONFIG_OPTIONS_MAX,
               "more rows than arrays beside them have room for");
