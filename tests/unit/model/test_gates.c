#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/buf.h"
#include "base/mem.h"
#include "base/sha256.h"
#include "kernels/number.h"
#include "model/gates.h"

/* Builds safetensors bytes in memory. */
struct builder {
    struct buf header, data;
    char metadata[512];
};

static void build_open(struct builder *b, const char *metadata) {
    buf_open(&b->header, 1 << 20);
    buf_open(&b->data, 1 << 24);
    snprintf(b->metadata, sizeof b->metadata, "%s", metadata);
}

static void build_tensor(struct builder *b, const char *name, const char *dtype, const char *shape,
                         const void *data, size_t bytes) {
    size_t begin = b->data.size;
    buf_add(&b->data, data, bytes);
    buf_fmt(&b->header, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}",
            name, dtype, shape, begin, b->data.size);
}

static void build_floats(struct builder *b, const char *name, const char *shape, size_t count,
                         float start) {
    float *values = mem_must_alloc(count, sizeof *values);
    for (size_t i = 0; i < count; i++) values[i] = start + (float)i / 64;
    build_tensor(b, name, "F32", shape, values, count * sizeof *values);
    mem_free(values);
}

static void build_close(struct builder *b, struct buf *out) {
    struct buf header;
    buf_open(&header, 1 << 20);
    buf_str(&header, "{\"__metadata__\":{\"format\":\"pt\"");
    if (b->metadata[0]) {
        buf_str(&header, ",\"keepd\":\"");
        for (const char *p = b->metadata; *p; p++) {
            if (*p == '"') buf_char(&header, '\\');
            buf_char(&header, *p);
        }
        buf_char(&header, '"');
    }
    buf_char(&header, '}');
    buf_add(&header, b->header.data, b->header.size);
    buf_char(&header, '}');
    while (header.size % 8) buf_char(&header, ' ');
    uint64_t size = header.size;
    buf_open(out, 1 << 25);
    buf_add(out, &size, sizeof size); /* little-endian machines only, as the daemon */
    buf_add(out, header.data, header.size);
    buf_add(out, b->data.data, b->data.size);
    buf_close(&header);
    buf_close(&b->header);
    buf_close(&b->data);
}

/* Two layers, two heads, d 4, width 3. */
static const struct gates_shape shape = {.layers = 2, .heads_kv = 2, .d_model = 4};
static const char header_rg[] =
    "{\"version\": 1, \"type\": \"rg\", \"width\": 3, \"act\": \"silu\","
    "\"layers\": 2, \"heads\": 2, \"trained_budget\": 256,"
    "\"horizon\": 128}";

/* The properties that tests vary. */
struct variant {
    const char *metadata;
    const char *w1, *last, *bias; /* shapes */
    size_t w1_count, b1_count, rows;
    const char *b1;
    int32_t row[4];
    const char *leave_out;
    bool two_layers;
    const char *row_dtype;
};

static const struct variant code_tying = {.metadata = header_rg,
                                          .w1 = "2,3,4",
                                          .w1_count = 24,
                                          .b1 = "2,3",
                                          .b1_count = 6,
                                          .last = "2,3",
                                          .bias = "2",
                                          .rows = 2,
                                          .row = {0, 1, 0, 1},
                                          .row_dtype = "I32"};

static void build(const struct variant *v, struct buf *out) {
    struct builder b;
    build_open(&b, v->metadata);
    const char *skip = v->leave_out ? v->leave_out : "";
    if (strcmp(skip, "w1") != 0) build_floats(&b, "w1", v->w1, v->w1_count, 1);
    if (strcmp(skip, "b1") != 0) build_floats(&b, "b1", v->b1, v->b1_count, 2);
    if (v->two_layers) {
        build_floats(&b, "w2", "2,3,3", 18, 3);
        if (strcmp(skip, "b2") != 0) build_floats(&b, "b2", "2,3", 6, 4);
    }
    if (strcmp(skip, "w_last") != 0) build_floats(&b, "w_last", v->last, v->rows * 3, 5);
    if (strcmp(skip, "c") != 0) build_floats(&b, "c", v->bias, v->rows, 6);
    if (strcmp(skip, "row") != 0)
        build_tensor(&b, "row", v->row_dtype, "2,2", v->row, sizeof v->row);
    build_close(&b, out);
}

static int parse(const struct variant *v, const struct gates_shape *model, struct gates *gates,
                 struct buf *file, struct fault *fault) {
    *fault = (struct fault){0};
    build(v, file);
    return gates_parse(file->data, file->size, model, gates, fault);
}

/* Files have rows for as many heads as the most of a layer. */
Test(gates, layers_with_fewer_heads_have_the_first) {
    static const struct kern_heads heads[] = {{2, 8}, {1, 16}};
    const struct gates_shape differ = {2, 2, 4, heads};
    struct variant own = code_tying;
    struct gates gates;
    struct fault fault;
    struct buf file;
    struct kern_gate_spec spec;
    own.row[2] = 1;
    own.row[3] = 0;
    cr_assert_eq(parse(&own, &differ, &gates, &file, &fault), 0, "%s", fault.text);
    cr_assert_eq(gates_layer(&gates, 0, &spec, &fault), 0);
    cr_assert(spec.heads_kv == 2 && spec.row_count == 2);
    cr_assert_eq(gates_layer(&gates, 1, &spec, &fault), 0);
    cr_assert(spec.heads_kv == 1 && spec.row_count == 1 && spec.row[0] == 0);
    cr_assert_eq(spec.last[0], 5 + 3 / 64.0f);
    cr_assert_eq(spec.bias[0], 6 + 1 / 64.0f);
    gates_close(&gates);
    buf_close(&file);
}

Test(gates, code_tying_shares_rows_over_layers) {
    struct gates gates;
    struct fault fault;
    struct buf file;
    struct kern_gate_spec spec;
    cr_assert_eq(parse(&code_tying, &shape, &gates, &file, &fault), 0, "%s: %s", fault.field,
                 fault.text);
    cr_assert(gates.header.width == 3 && gates.header.trained_budget == 256);
    cr_assert_eq(gates.header.horizon, 128.0f);
    cr_assert_eq(gates_layer(&gates, 1, &spec, &fault), 0);
    cr_assert(spec.width == 3 && spec.d_model == 4 && spec.heads_kv == 2 && spec.row_count == 2);
    cr_assert_eq(spec.embeddings, 1);
    cr_assert_null(spec.w2);
    cr_assert_eq(spec.w1[0], 1 + 12 / 64.0f, "layer 1 starts after 12 numbers");
    cr_assert_eq(spec.b1[0], 2 + 3 / 64.0f);
    cr_assert_eq(spec.last[4], 5 + 4 / 64.0f);
    cr_assert_eq(spec.bias[1], 6 + 1 / 64.0f);
    cr_assert(spec.row[0] == 0 && spec.row[1] == 1);
    gates_close(&gates);
    buf_close(&file);
}

Test(gates, untied_rows_are_those_of_the_layer) {
    struct variant v = code_tying;
    struct gates gates;
    struct fault fault;
    struct buf file;
    struct kern_gate_spec spec;
    v.last = "4,3", v.bias = "4", v.rows = 4;
    memcpy(v.row, (int32_t[]){0, 1, 3, 2}, sizeof v.row);
    cr_assert_eq(parse(&v, &shape, &gates, &file, &fault), 0, "%s: %s", fault.field, fault.text);
    cr_assert_eq(gates_layer(&gates, 1, &spec, &fault), 0);
    cr_assert_eq(spec.row_count, 2);
    cr_assert_eq(spec.last[spec.row[0] * 3], 5 + 9 / 64.0f, "head 0 uses row 3");
    cr_assert_eq(spec.last[spec.row[1] * 3], 5 + 6 / 64.0f, "head 1 uses row 2");
    cr_assert_eq(spec.bias[spec.row[0]], 6 + 3 / 64.0f);
    gates_close(&gates);
    buf_close(&file);
}

Test(gates, paper_tying_has_an_embedding_per_head_and_one_row) {
    struct variant v = code_tying;
    struct gates gates;
    struct fault fault;
    struct buf file;
    struct kern_gate_spec spec;
    v.w1 = "4,3,4", v.w1_count = 48, v.b1 = "4,3", v.b1_count = 12;
    v.last = "1,3", v.bias = "1", v.rows = 1;
    memset(v.row, 0, sizeof v.row);
    cr_assert_eq(parse(&v, &shape, &gates, &file, &fault), 0, "%s: %s", fault.field, fault.text);
    cr_assert_eq(gates_layer(&gates, 1, &spec, &fault), 0);
    cr_assert(spec.embeddings == 2 && spec.row_count == 1);
    cr_assert(spec.row[0] == 0 && spec.row[1] == 0);
    cr_assert_eq(spec.w1[0], 1 + 24 / 64.0f);
    cr_assert_eq(spec.b1[3], 2 + 9 / 64.0f, "head 1 of layer 1");
    gates_close(&gates);
    buf_close(&file);
}

Test(gates, rg10_has_a_second_layer) {
    struct variant v = code_tying;
    struct gates gates;
    struct fault fault;
    struct buf file;
    struct kern_gate_spec spec;
    v.two_layers = true;
    v.metadata = "{\"version\":1,\"type\":\"rg10\",\"width\":3,\"layers\":2,\"heads\":2,"
                 "\"horizon\":\"inf\"}";
    cr_assert_eq(parse(&v, &shape, &gates, &file, &fault), 0, "%s: %s", fault.field, fault.text);
    cr_assert(isinf(gates.header.horizon) && gates.header.trained_budget == 0);
    cr_assert_eq(gates_layer(&gates, 1, &spec, &fault), 0);
    cr_assert_eq(spec.w2[0], 3 + 9 / 64.0f);
    cr_assert_eq(spec.b2[0], 4 + 3 / 64.0f);
    gates_close(&gates);
    buf_close(&file);
}

static int parse_header(const char *rest, struct gates_header *out, struct fault *fault) {
    char json[256];
    snprintf(json, sizeof json,
             "{\"version\": 1, \"type\": \"rg\", \"width\": 3, \"layers\": 2, "
             "\"heads\": 2%s}",
             rest);
    *fault = (struct fault){0};
    return gates_header_parse(json, strlen(json), out, fault);
}

Test(gates, the_header_says_what_they_were_trained_for) {
    struct gates_header header;
    struct fault fault;
    cr_assert_eq(parse_header("", &header, &fault), 0, "%s", fault.text);
    cr_assert(header.horizon == 0 && header.sinks == -1 && header.recent == -1 &&
              header.parity == -1);
    cr_assert_eq(parse_header(", \"horizon\": 1, \"sinks\": 0, \"recent\": 32, \"parity\": false",
                              &header, &fault),
                 0, "%s", fault.text);
    cr_assert(header.horizon == 1 && header.sinks == 0 && header.recent == 32 &&
              header.parity == 0);
    cr_assert_eq(parse_header(", \"parity\": true", &header, &fault), 0);
    cr_assert_eq(header.parity, 1);
    static const char *const wrong[][2] = {{", \"horizon\": 0.5", "keepd.horizon"},
                                           {", \"sinks\": -1", "keepd.sinks"},
                                           {", \"recent\": 1.5", "keepd.recent"},
                                           {", \"parity\": 1", "keepd.parity"}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        cr_assert_neq(parse_header(wrong[i][0], &header, &fault), 0, "%s", wrong[i][0]);
        cr_assert_str_eq(fault.field, wrong[i][1]);
    }
}

static void refuse(const struct variant *v, const struct gates_shape *model, int expected,
                   const char *field) {
    struct gates gates;
    struct fault fault;
    struct buf file;
    int rc = parse(v, model, &gates, &file, &fault);
    cr_assert_eq(rc, expected, "%s: gave %s (%s: %s)", field, err_name(rc), fault.field,
                 fault.text);
    cr_assert_str_eq(fault.field, field, "%s: %s", fault.field, fault.text);
    cr_assert(fault.text[0] != '\0');
    buf_close(&file);
}

Test(gates, another_models_gates_are_refused_by_tensor) {
    refuse(&code_tying, &(struct gates_shape){3, 2, 4, NULL}, ERR_INVALID, "w1");
    refuse(&code_tying, &(struct gates_shape){2, 2, 5, NULL}, ERR_INVALID, "w1");
    refuse(&code_tying, &(struct gates_shape){2, 3, 4, NULL}, ERR_INVALID, "row");
    struct variant v = code_tying;
    v.metadata = "{\"version\":1,\"type\":\"rg\",\"width\":3,\"layers\":4,\"heads\":2}";
    refuse(&v, &shape, ERR_INVALID, "keepd.layers");
    v.metadata = "{\"version\":1,\"type\":\"rg\",\"width\":3,\"layers\":2,\"heads\":1}";
    refuse(&v, &shape, ERR_INVALID, "keepd.heads");
}

Test(gates, tensors_must_be_there_with_their_shapes) {
    static const char *const names[] = {"w1", "b1", "w_last", "c", "row"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        struct variant v = code_tying;
        v.leave_out = names[i];
        refuse(&v, &shape, ERR_NOTFOUND, names[i]);
    }
    struct variant v = code_tying;
    v.metadata = "{\"version\":1,\"type\":\"rg10\",\"width\":3,\"layers\":2,\"heads\":2}";
    refuse(&v, &shape, ERR_NOTFOUND, "w2");
    v.two_layers = true;
    v.leave_out = "b2";
    refuse(&v, &shape, ERR_NOTFOUND, "b2");
    v = code_tying;
    v.bias = "1,2";
    refuse(&v, &shape, ERR_INVALID, "c");
    v = code_tying;
    v.row_dtype = "F32";
    refuse(&v, &shape, ERR_UNSUPPORTED, "row");
    v = code_tying;
    v.row[3] = 2;
    refuse(&v, &shape, ERR_INVALID, "row");
    v.row[3] = -1;
    refuse(&v, &shape, ERR_INVALID, "row");
    v = code_tying;
    v.last = "5,3", v.bias = "5", v.rows = 5;
    refuse(&v, &shape, ERR_INVALID, "w_last");
    v = code_tying;
    v.two_layers = true;
    v.w1 = "4,3,4", v.w1_count = 48, v.b1 = "4,3", v.b1_count = 12;
    v.metadata = "{\"version\":1,\"type\":\"rg10\",\"width\":3,\"layers\":2,\"heads\":2}";
    refuse(&v, &shape, ERR_UNSUPPORTED, "w1");
}

Test(gates, header_fields_are_checked) {
    static const struct {
        const char *json;
        int rc;
        const char *field;
    } cases[] = {
        {"[]", ERR_MALFORMED, "keepd"},
        {"{", ERR_MALFORMED, "keepd"},
        {"{\"version\":2,\"type\":\"rg\"}", ERR_UNSUPPORTED, "keepd.version"},
        {"{\"version\":1,\"type\":\"rg2\"}", ERR_UNSUPPORTED, "keepd.type"},
        {"{\"version\":1,\"type\":\"rg\",\"act\":\"gelu\"}", ERR_UNSUPPORTED, "keepd.act"},
        {"{\"version\":1,\"type\":\"rg\",\"layers\":2,\"heads\":2}", ERR_INVALID, "keepd"},
        {"{\"version\":1,\"type\":\"rg\",\"width\":0}", ERR_INVALID, "keepd.width"},
        {"{\"version\":1,\"type\":\"rg\",\"width\":3,\"layers\":2,\"heads\":2,\"horizon\":0}",
         ERR_INVALID, "keepd.horizon"},
        {"{\"version\":1,\"type\":\"rg\",\"width\":3,\"layers\":2,\"heads\":2,"
         "\"base\":\"12\"}",
         ERR_INVALID, "keepd.base"},
        {"{\"version\":1,\"type\":\"rg\",\"width\":3,\"layers\":2,\"heads\":2,"
         "\"base\":{\"vectors\":\"12\"}}",
         ERR_INVALID, "keepd.base.vectors"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct gates_header header;
        struct fault fault = {0};
        int rc = gates_header_parse(cases[i].json, strlen(cases[i].json), &header, &fault);
        cr_assert_eq(rc, cases[i].rc, "%s gave %s", cases[i].json, err_name(rc));
        cr_assert_str_eq(fault.field, cases[i].field, "%s", cases[i].json);
    }
    struct variant v = code_tying;
    v.metadata = "";
    refuse(&v, &shape, ERR_INVALID, "__metadata__.keepd");
}

Test(gates, numbers_must_be_finite) {
    struct gates gates;
    struct fault fault;
    struct buf file;
    struct kern_gate_spec spec;
    cr_assert_eq(parse(&code_tying, &shape, &gates, &file, &fault), 0);
    float *c = (float *)((char *)file.data + ((const char *)gates.bias->data - file.data));
    float bad = NAN;
    memcpy(c + 1, &bad, sizeof bad);
    cr_assert_eq(gates_layer(&gates, 0, &spec, &fault), ERR_INVALID);
    cr_assert_str_eq(fault.field, "c");
    gates_close(&gates);
    buf_close(&file);
}

Test(gates, every_allocation_may_fail) {
    struct buf file;
    int failures = 0;
    build(&code_tying, &file);
    for (long n = 0;; n++) {
        struct gates gates;
        mem_fail_after(n);
        int rc = gates_parse(file.data, file.size, &shape, &gates, NULL);
        bool pending = mem_fail_pending();
        mem_fail_after(-1);
        if (!rc) {
            cr_assert(pending);
            gates_close(&gates);
            break;
        }
        cr_assert_eq(rc, ERR_NOMEM);
        failures++;
    }
    cr_assert(failures > 0);
    buf_close(&file);
}

Test(gates, every_cut_of_the_file_is_refused) {
    struct buf file;
    build(&code_tying, &file);
    for (size_t size = 0; size < file.size; size++) {
        struct gates gates;
        char *copy = mem_must_alloc(size ? size : 1,
                                    1); /* a separate block, so that overruns are detected */
        memcpy(copy, file.data, size);
        cr_assert_neq(gates_parse(copy, size, &shape, &gates, NULL), 0, "cut at %zu", size);
        mem_free(copy);
    }
    buf_close(&file);
}

Test(floats, half_precision) {
    static const struct {
        uint16_t bits;
        float value;
    } cases[] = {{0x0000, 0.0f},        {0x3c00, 1.0f},       {0xc000, -2.0f},
                 {0x7bff, 65504.0f},    {0x0400, 0x1p-14f},   {0x0001, 0x1p-24f},
                 {0x83ff, -0x3ffp-24f}, {0x3555, 0.33325195f}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        cr_assert_eq(number_from_f16(cases[i].bits), cases[i].value, "%04x", cases[i].bits);
    cr_assert(isinf(number_from_f16(0xfc00)) && number_from_f16(0xfc00) < 0);
    cr_assert(isnan(number_from_f16(0x7e00)));
    cr_assert(signbit(number_from_f16(0x8000)));
    cr_assert_eq(number_from_bf16(0x3fc0), 1.5f);
}

/* FIPS 180-4 examples, and every length around a block's end. */
Test(sha256, known_answers) {
    char hex[SHA256_HEX];
    sha256_hex("abc", 3, hex);
    cr_assert_str_eq(hex, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    sha256_hex("", 0, hex);
    cr_assert_str_eq(hex, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    const char *two = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
    sha256_hex(two, strlen(two), hex);
    cr_assert_str_eq(hex, "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    char a[130];
    memset(a, 'a', sizeof a);
    sha256_hex(a, 64, hex);
    cr_assert_str_eq(hex, "ffe054fe7ae0cb6dc65c3af9b61d5209f439851db43d0ba5997337df154668eb");
    sha256_hex(a, 119, hex);
    cr_assert_str_eq(hex, "31eba51c313a5c08226adf18d4a359cfdfd8d2e816b13f4af952f7ea6584dcfb");
}
