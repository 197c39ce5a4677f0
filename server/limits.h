/* Limits of one request: every limit of the API in one place. Beyond a limit the answer is a 400
 * that names the field and the limit; tests/http/test_limits.py tests each limit and the value
 * after it. Limits of connections, headers and bodies are options (config/). */
#ifndef KEEPD_SERVER_LIMITS_H
#define KEEPD_SERVER_LIMITS_H

#include <stddef.h>

#define OAI_JSON_DEPTH         512    /* JSON_MAX_DEPTH */
#define OAI_JSON_VALUES        100000 /* JSON values besides the token ids of the longest text */
#define OAI_MESSAGES_MAX       4096
#define OAI_PICTURES_MAX       64   /* pictures of one request; each takes a process for a moment */
#define OAI_TOOLS_MAX          4096 /* names are compared with each other */
#define OAI_TOOL_NAME_BYTES    128
#define OAI_PROMPTS_MAX        128     /* per request; each is a job with its own queue place */
#define OAI_INPUTS_MAX         2048    /* texts of one request for vectors */
#define OAI_INPUTS_AT_ONCE     64      /* texts in the engine at a time, each with a queue place */
#define OAI_NUMBERS_FLOAT      1048576 /* numbers of an answer of vectors, written as text */
#define OAI_NUMBERS_BASE64     8388608 /* and in base64 */
#define OAI_N_MAX              128     /* choices per prompt */
#define OAI_CHOICES_MAX        256     /* per request: prompts x n */
#define OAI_SCORES_MAX         4194304 /* per answer: choices x tokens x (1 + alternatives) */
#define OAI_SCORES_AT_ONCE     1048576 /* scores written in one turn of the loop, see prepare.c */
#define OAI_CHOICES_LISTED_MAX 10000   /* texts of guided_choice; constrain/limits.h has the rest */
#define OAI_STOPS_MAX          256
#define OAI_STOP_BYTES         16384 /* all stop strings together: every token compares them */
#define OAI_STOP_IDS_MAX       256
#define OAI_BIAS_MAX           1024
#define OAI_BREAKERS_MAX       32
#define OAI_LOOP_MAX           2048 /* tokens of a block that is repeated: each token compares as many */
#define OAI_SAMPLERS_MAX       16
#define OAI_MEMBERS_MAX        64   /* response_fields */
#define OAI_FILES_MAX          256  /* input_extra */
#define OAI_KEY_BYTES          1024 /* cache_salt, prompt_cache_key and other opaque keys */
#define OAI_ID_BYTES           512  /* user, safety_identifier, and the ids of items and calls */
#define OAI_ROLE_MAX           64   /* bytes of a message's role */
#define OAI_METADATA_MAX       16   /* pairs of metadata */
#define OAI_METADATA_KEY       64   /* characters of a key of metadata */
#define OAI_METADATA_VALUE     512  /* characters of a value of metadata */
#define OAI_PAGE_MAX           100  /* items of a page that a client asks for */
#define OAI_RECORDS_MAX        4096 /* stored responses */
#define OAI_RECORD_BYTES       ((size_t)64 << 20) /* together; one takes at most a part (records.h) */
#define OAI_NAMES_MAX          16                 /* served model names */
#define OAI_TEMPERATURE_MAX    1000000.0 /* all tokens are equally likely long before this */
#define OAI_REPETITION_MIN     0.01      /* repetition_penalty */
#define OAI_REPETITION_MAX     100.0
#define OAI_COMPLETION_TOKENS  16 /* OpenAI's max_tokens of /v1/completions when absent */

#endif
