/* Grammars in both forms: which texts belong, what a mask allows, faults with their place, and
 * texts of clients that mean to be expensive. */
#include "language.h"

static const char gbnf_json[] =
    "root   ::= object\n"
    "value  ::= object | array | string | number | (\"true\" | \"false\" | \"null\") ws\n"
    "object ::=\n"
    "  \"{\" ws (\n"
    "            string \":\" ws value\n"
    "    (\",\" ws string \":\" ws value)*\n"
    "  )? \"}\" ws\n"
    "array ::= \"[\" ws ( value (\",\" ws value)* )? \"]\" ws   # a list\n"
    "string ::= \"\\\"\" ([^\"\\\\\\x7F\\x00-\\x1F] | \"\\\\\" ([\"\\\\bfnrt] | \"u\" "
    "[0-9a-fA-F]{4}))* \"\\\"\" ws\n"
    "number ::= (\"-\"? ([0-9] | [1-9] [0-9]{0,15})) (\".\" [0-9]+)? ws\n"
    "ws ::= | \" \" | \"\\n\" [ \\t]{0,20}\n";

static const char lark_sums[] = "?start: sum\n"
                                "      | NAME \"=\" sum    -> assign\n"
                                "?sum: product\n"
                                "    | sum \"+\" product   -> add\n"
                                "?product: atom | product \"*\" atom\n"
                                "?atom.2: NUMBER | \"-\" atom | NAME -> var | \"(\" sum \")\"\n"
                                "%import common.CNAME -> NAME\n"
                                "%import common (NUMBER, WS_INLINE)\n"
                                "%ignore WS_INLINE   // between terminals\n";

static const struct {
    const char *grammar;
    const char *good[6], *bad[6];
} cases[] = {
    {gbnf_json,
     {"{\"a\": [1, true, {\"b\": \"x\\\\n\"}]}", "{}", "{\n  \"a\":-0.5}"},
     {"[]", "{\"a\": }", "{\"a\":01}", "{\"a\":\"\n\"}"}},
    {lark_sums, {"x = 1 + 2*(3)", "((1))", "-x", " 1 ", "1+2+3"}, {"1+", "1 2", "", "x==1"}},
    {"root ::= root \",\" [a-z] | [a-z]", {"a", "a,b,c"}, {"", ",a", "a,"}},
    {"root ::= (\"a\" root \"b\")?", {"", "ab", "aaabbb"}, {"aab", "ba"}},
    {"root ::= [^\\n] .", {"日本", "a\n"}, {"\na", "a", "abc"}},
    {"root ::= a{2,3} | b+\na ::= \"p\" | \"\"\nb ::= \"q\" a\n",
     {"", "ppp", "qpqq"},
     {"pppp", "pq"}},
    {"root ::=\n  \"a\"\n  | \"b\" # or\nrest-1 ::= \"c\"", {"a", "b"}, {"c", "ab"}},
    {"root ::= \"\\u65e5\\x41\" [\\]\\-]", {"日A]", "日A-"}, {"日A"}},
    {"start: \"SELECT\"i [\"x\"~2] WORD+\nWORD: \"a\"..\"c\" | /d[ef]/i\n",
     {"selectxxa", "SELECTabdf", "SelectDE"},
     {"select", "selectxa", "SELECTd"}},
    {"!start: _item (\",\" _item)*\n_item: A -> first\n     | B\nA: \"a\" B?\nB: \"b\"\n",
     {"a", "ab,b", "b,a"},
     {"a b", "a,", "ba"}},
};

Test(grammar, texts_belong_and_others_do_not) {
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct language l = language_text(CONSTRAIN_GRAMMAR, cases[i].grammar);
        cr_assert_eq(l.rc, 0, "%s: %s", cases[i].grammar, l.fault.text);
        for (int k = 0; k < 6 && cases[i].good[k] != NULL; k++)
            cr_assert(language_holds(&l, cases[i].good[k]), "%s\nholds '%s'", cases[i].grammar,
                      cases[i].good[k]);
        for (int k = 0; k < 6 && cases[i].bad[k] != NULL; k++)
            cr_assert_not(language_holds(&l, cases[i].bad[k]), "%s\ndoes not hold '%s'",
                          cases[i].grammar, cases[i].bad[k]);
        language_close(&l);
    }
}

Test(grammar, masks_know_the_stack) {
    struct language l = language_text(CONSTRAIN_GRAMMAR, gbnf_json);
    struct constrain_at at = {0};
    struct constrain_next next;
    const char *text = "{\"a\":[[{\"b\":[";
    cr_assert_eq(constrain_next(l.constrain, &at, text, strlen(text), l.mask, &next), 0);
    cr_assert(!next.accepts && next.continues);
    cr_assert(language_allows(&l, ']') && language_allows(&l, '"') && !language_allows(&l, '}'));
    cr_assert(language_allows(&l, 256 + 6) && language_allows(&l, 256 + 19), "{\" and [[");
    cr_assert_not(language_allows(&l, 256 + 20), "one list is open: not ]]");
    text = "{\"a\":[[1]]}";
    at = (struct constrain_at){0};
    cr_assert_eq(constrain_next(l.constrain, &at, text, strlen(text), l.mask, &next), 0);
    cr_assert(next.accepts && !language_allows(&l, '}') && language_allows(&l, ' '));
    language_close(&l);
}

static const struct {
    const char *grammar, *text;
    int rc;
} refusals[] = {
    {"root ::= \"a\" b", "line 1, column 14: the rule 'b' is not defined", ERR_INVALID},
    {"root ::= \"a\"\nroot ::= \"b\"", "line 2, column 1: the rule 'root' is defined twice",
     ERR_INVALID},
    {"# é\nroot ::= \"é\" (\"a\"", "line 2, column 14: a group without its ')'", ERR_INVALID},
    {"root ::= \"a\nb ::= \"c\"", "line 1, column 10: a text without its closing quote",
     ERR_INVALID},
    {"root ::= [b-a]", "line 1, column 10: a range whose ends", ERR_INVALID},
    {"root ::= [ab", "line 1, column 10: a class without its ']'", ERR_INVALID},
    {"root ::= \"\\q\"", "line 1, column 13: an unknown escape", ERR_INVALID},
    {"root ::= \"\\uD800\"", "expected a Unicode character", ERR_INVALID},
    {"root ::= \"a\"{3,2}", "line 1, column 13: bounds in the wrong order", ERR_INVALID},
    {"root ::= \"a\"{2000000}", "line 1, column 14: a repetition of more than", ERR_LIMIT},
    {"root ::= \"a\"*?+{2}{1,3}", "line 1, column 19: more than 4 quantifiers in a row", ERR_LIMIT},
    {"root ::= \"a\" )", "line 1, column 14: a ')' without", ERR_INVALID},
    {"root ::= *", "line 1, column 10: expected a text", ERR_INVALID},
    {"roots ::= \"a\"", "there is no rule 'root'", ERR_INVALID},
    {"root ::= <think>", "line 1, column 10: a token (<...>)", ERR_UNSUPPORTED},
    {"root ::= a\na ::= b \"x\" | \"q\"\nb ::= a \"y\"", "the rule 'a' begins with itself by way",
     ERR_UNSUPPORTED},
    {"root ::= root \"a\"", "no text matches it", ERR_INVALID},
    {"start: \"a\" b", "line 1, column 12: the rule 'b' is not defined", ERR_INVALID},
    {"start: a{b}", "line 1, column 8: a template", ERR_UNSUPPORTED},
    {"start: \"a\"\n%declare X", "line 2, column 1: '%declare' is not supported", ERR_UNSUPPORTED},
    {"%import python.X\nstart: \"a\"", "line 1, column 9: only imports of 'common'",
     ERR_UNSUPPORTED},
    {"%import common.X\nstart: \"a\"", "the import of 'X' is not supported", ERR_UNSUPPORTED},
    {"start: /a(?<=b)/", "line 1, column 9: a look-behind", ERR_UNSUPPORTED},
    {"start: /a/x", "line 1, column 11: the flag 'x'", ERR_UNSUPPORTED},
    {"start: \"a\"~3..1", "line 1, column 11: expected a count", ERR_INVALID},
    {"start: \"ab\"..\"c\"", "line 1, column 8: expected a range of two", ERR_INVALID},
    {"start: A A\nA: \"a\"\n%ignore blank\nblank: \" \"",
     "line 3, column 9: the rule 'blank' in a terminal or in %ignore", ERR_UNSUPPORTED},
    {"start: A A\nA: \"a\"\n%ignore B\nB: blank\nblank: \" \"",
     "line 4, column 4: the rule 'blank' in a terminal or in %ignore", ERR_UNSUPPORTED},
    {"start: \"a\" -> ", "expected a name behind '->'", ERR_INVALID},
    {"start \"a\"", "line 1, column 7: expected ':'", ERR_INVALID},
    {"start: [\"a\")", "line 1, column 8: a group without its ']'", ERR_INVALID},
    {"", "there is no rule 'start'", ERR_INVALID},
};

Test(grammar, faults_have_their_place) {
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        struct language l = language_text(CONSTRAIN_GRAMMAR, refusals[i].grammar);
        cr_assert_eq(l.rc, refusals[i].rc, "%s: %d %s", refusals[i].grammar, l.rc, l.fault.text);
        cr_assert_not_null(strstr(l.fault.text, refusals[i].text), "%s: %s", refusals[i].grammar,
                           l.fault.text);
        cr_assert_str_eq(l.fault.field, "f");
        language_close(&l);
    }
}

static void expect(struct buf *text, int rc, const char *good) {
    struct language l = language_text(CONSTRAIN_GRAMMAR, text->data);
    cr_assert_eq(l.rc, rc, "%.40s: %d %s", text->data, l.rc, l.fault.text);
    if (good != NULL) cr_assert(language_holds(&l, good), "%.40s holds %s", text->data, good);
    language_close(&l);
    buf_clear(text);
}

Test(grammar, hostile_grammars_end) {
    struct buf text;
    buf_open(&text, 1 << 24);
    buf_str(&text, "root ::= ");
    for (int i = 0; i < 300; i++) buf_char(&text, '(');
    expect(&text, ERR_LIMIT, NULL);
    buf_str(&text, "root ::= a0\n"); /* a chain of rules, each behind its use */
    for (int i = 0; i < 3000; i++) buf_fmt(&text, "a%d ::= \"(\" a%d \")\" | \"x\"\n", i, i + 1);
    buf_str(&text, "a3000 ::= \"y\"\n");
    expect(&text, 0, "((x))");
    buf_str(&text, "root ::= a0\n"); /* a long way to begin with oneself */
    for (int i = 0; i < 20000; i++) buf_fmt(&text, "a%d ::= a%d \"x\"\n", i, i + 1);
    buf_str(&text, "a20000 ::= a0 | \"y\"\n");
    expect(&text, ERR_LIMIT, NULL);
    buf_str(&text, "start: A0\n");
    for (int i = 0; i < 40; i++) buf_fmt(&text, "A%d: A%d A%d\n", i, i + 1, i + 1);
    buf_str(&text, "A40: \"a\"\n"); /* 2^40 letters */
    expect(&text, 0, NULL);
    buf_str(&text, "start: ");
    for (int i = 0; i < 200000; i++) buf_fmt(&text, "%s\"w%d\"", i > 0 ? "|" : "", i);
    struct language l = language_text(CONSTRAIN_GRAMMAR, text.data);
    cr_assert(l.rc == 0 || l.rc == ERR_LIMIT, "%d %s", l.rc, l.fault.text);
    language_close(&l);
    buf_close(&text);
}

/* Compiles the text and goes into its first characters, which recurses as deep as the expressions
 * lie in each other. */
static void expect_step(struct buf *text, int rc, const char *step) {
    struct language l = language_text(CONSTRAIN_GRAMMAR, text->data);
    cr_assert_eq(l.rc, rc, "%.40s: %d %s", text->data, l.rc, l.fault.text);
    if (rc == 0) (void)language_holds(&l, step);
    language_close(&l);
    buf_clear(text);
}

/* Rules whose bodies replace their names: `groups` repeated groups in each of `rules` bodies. */
static void write_nested_rules(struct buf *text, const char *define, const char *open,
                               const char *close, int rules, int groups) {
    for (int i = 0; i < rules; i++) {
        buf_fmt(text, "r%d%s", i, define);
        for (int k = 0; k < groups; k++) buf_str(text, open);
        buf_fmt(text, "r%d", i + 1);
        for (int k = 0; k < groups; k++) buf_str(text, close);
        buf_char(text, '\n');
    }
    buf_fmt(text, "r%d%s\"0\"\n", rules, define);
}

Test(grammar, repetitions_inside_each_other_have_a_limit) {
    struct buf text;
    buf_open(&text, 1 << 24);
    buf_str(&text, "root ::= \"a\"");
    for (int i = 0; i < 50000; i++) buf_str(&text, "{2,3}");
    expect_step(&text, ERR_LIMIT, "a");
    buf_str(&text, "root ::= \"a\"{1,2}{1,2}{1,2}{1,2}\n");
    expect(&text, 0, "aaaaa");
    buf_str(&text, "root ::= r0\n");
    write_nested_rules(&text, " ::= ", "(\"b\"{0,2} ", " \"a\" | \"0\"){1,3}", 33, 250);
    expect_step(&text, ERR_LIMIT, "b");
    buf_str(&text, "root ::= r0\n");
    write_nested_rules(&text, " ::= ", "(", "{0,2} \"a\" | \"0\"){1,3}", 33, 250);
    expect_step(&text, ERR_LIMIT, "0");
    buf_str(&text, "start: r0\n");
    write_nested_rules(&text, ": ", "((", "~0..2 \"a\" | \"0\")~1..3)", 33, 120);
    expect_step(&text, ERR_LIMIT, "0");
    buf_str(&text, "root ::= "); /* as deep as groups may lie: still compiled, and answered */
    for (int i = 0; i < 250; i++) buf_char(&text, '(');
    buf_str(&text, "\"a\"");
    for (int i = 0; i < 250; i++) buf_str(&text, "{0,2} \"b\" | \"0\"){1,3}");
    expect(&text, 0, "00");
    buf_close(&text);
}
