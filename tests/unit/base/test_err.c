#include <criterion/criterion.h>
#include <string.h>

#include "base/err.h"

Test(err, names_and_texts) {
    cr_assert_str_eq(err_name(ERR_NOMEM), "ERR_NOMEM");
    cr_assert_str_eq(err_text(ERR_FULL), "full");
    cr_assert_str_eq(err_name(0), "ERR_OK");
    cr_assert_str_eq(err_name(12345), "ERR_UNKNOWN");
    cr_assert_str_eq(err_text(12345), "unknown error");
}

Test(err, every_code_is_negative_and_has_its_own_name) {
    static const int codes[] = {
#define X(name, value, text) ERR_##name,
        ERR_MAP(X)
#undef X
    };
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++) {
        cr_assert_lt(codes[i], 0);
        cr_assert_str_neq(err_name(codes[i]), "ERR_UNKNOWN");
        for (size_t j = 0; j < i; j++) cr_assert_neq(codes[i], codes[j]);
    }
}

Test(err, fault_is_filled_and_the_code_returned) {
    struct fault fault;
    cr_assert_eq(fault_set(&fault, ERR_LIMIT, "kv.budget", "at most %d", 7), ERR_LIMIT);
    cr_assert_eq(fault.code, ERR_LIMIT);
    cr_assert_str_eq(fault.field, "kv.budget");
    cr_assert_str_eq(fault.text, "at most 7");
    cr_assert_eq(fault_set(NULL, ERR_IO, NULL, "nobody reads this"), ERR_IO);
    fault_set(&fault, ERR_IO, NULL, "x");
    cr_assert_str_eq(fault.field, "");
}

Test(err, fault_may_wrap_itself) {
    struct fault fault;
    fault_set(&fault, ERR_INVALID, "b", "inner");
    fault_set(&fault, fault.code, fault.field, "outer: %s", fault.text);
    cr_assert_str_eq(fault.field, "b");
    cr_assert_str_eq(fault.text, "outer: inner");
}

/* File names may hold any byte but zero. */
Test(err, a_fault_is_one_line) {
    struct fault fault;
    fault_set(&fault, ERR_NOTFOUND, "a\nb", "not in /tmp/\x1b[31mx\ny\x7f/\xc3\xa9");
    cr_assert_str_eq(fault.field, "a?b");
    cr_assert_str_eq(fault.text, "not in /tmp/?[31mx?y?/\xc3\xa9");
}

Test(err, long_texts_are_cut) {
    struct {
        struct fault fault;
        char guard[16];
    } box;
    char text[1000];
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    memset(&box, '#', sizeof box);
    fault_set(&box.fault, ERR_INVALID, text, "%s", text);
    cr_assert_eq(strlen(box.fault.field), sizeof box.fault.field - 1);
    cr_assert_eq(strlen(box.fault.text), sizeof box.fault.text - 1);
    for (size_t i = 0; i < sizeof box.guard; i++) cr_assert_eq(box.guard[i], '#');
}
