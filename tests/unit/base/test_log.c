#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "base/log.h"

/* stderr into a temporary file, read back by caught(). */
static int capture(void) {
    char name[] = "/tmp/keepd-log-XXXXXX";
    int fd = mkstemp(name);
    cr_assert_geq(fd, 0);
    unlink(name);
    cr_assert_eq(dup2(fd, STDERR_FILENO), STDERR_FILENO);
    return fd;
}

static size_t caught(int fd, char *text, size_t size) {
    ssize_t n = pread(fd, text, size - 1, 0);
    cr_assert_geq(n, 0);
    text[n] = '\0';
    return (size_t)n;
}

Test(log, one_line_with_time_and_level) {
    char text[5000];
    int fd = capture();
    unsetenv("JOURNAL_STREAM");
    log_warn("value %d", 3);
    log_debug("not shown");
    caught(fd, text, sizeof text);
    cr_assert_eq(text[10], 'T');
    cr_assert_str_eq(strchr(text, ' '), " warn  value 3\n");
    log_set_level(LOG_LEVEL_ERROR);
    log_warn("not shown either");
    char again[5000];
    caught(fd, again, sizeof again);
    cr_assert_str_eq(text, again);
}

Test(log, a_client_cannot_forge_lines) {
    char text[5000];
    int fd = capture();
    log_error("%s", "a\nb\033[31m\x7f");
    caught(fd, text, sizeof text);
    cr_assert_not_null(strstr(text, "a?b?[31m?\n"));
}

/* U+009B is a control sequence's beginning in one character; U+202E turns the rest of the line. */
Test(log, only_text_is_shown) {
    static const char said[] = "\xc3\xa9|\xe2\x82\xac|\xf0\x9f\x98\x80|\xc2\x9b"
                               "31m|\x9b|\xff\xfe|\xe2\x80\xae|\xe2\x80\xa8|\xc3";
    static const char shown[] = "\xc3\xa9|\xe2\x82\xac|\xf0\x9f\x98\x80|?31m|?|?"
                                "?|?|?|?";
    char text[9000], huge[4095];
    int fd = capture();
    log_error("%s", said);
    log_set_format(LOG_FORMAT_JSON);
    log_error("%s", said);
    memset(huge, 'x', sizeof huge);
    for (size_t i = 1; i + 3 < sizeof huge; i += 3) memcpy(huge + i, "\xe2\x82\xac", 3);
    log_error("%.*s", 2047, huge);
    log_set_format(LOG_FORMAT_PLAIN);
    caught(fd, text, sizeof text);
    char *first = strstr(text, shown), *second = first ? strstr(first + 1, shown) : NULL;
    cr_assert(first && second, "%s", text);
    cr_assert_not_null(strstr(second, "\xe2\x82\xac...\"}\n"), "a character is not cut");
}

Test(log, long_lines_are_cut_and_say_so) {
    char text[9000], huge[8000];
    int fd = capture();
    memset(huge, 'x', sizeof huge - 1);
    huge[sizeof huge - 1] = '\0';
    log_error("%s", huge);
    size_t n = caught(fd, text, sizeof text);
    cr_assert_leq(n, 2048);
    cr_assert_str_eq(text + n - 5, "x...\n");
}

Test(log, journal_gets_its_prefix_only_when_stderr_is_the_journal) {
    char text[5000], stream[64];
    struct stat st;
    int fd = capture();
    fstat(fd, &st);
    snprintf(stream, sizeof stream, "%llu:%llu", (unsigned long long)st.st_dev,
             (unsigned long long)st.st_ino);
    setenv("JOURNAL_STREAM", stream, 1);
    log_error("x");
    caught(fd, text, sizeof text);
    cr_assert_str_eq(text, "<3>x\n");
    setenv("JOURNAL_STREAM", "1:1", 1);
    log_error("x");
    caught(fd, text, sizeof text);
    cr_assert_not_null(strstr(text, "Z error x\n"));
}

Test(check, failure_aborts, .signal = SIGABRT) {
    CHECK_MSG(1 + 1 == 3, "sum of %d", 2);
}

Test(check, success_goes_on) {
    int evaluated = 0;
    CHECK(++evaluated == 1);
    cr_assert_eq(evaluated, 1);
}

Test(log, json_lines) {
    char text[5000];
    int fd = capture();
    const struct log_field fields[] = {
        {"path", "/v1/\"x\\", 0}, {"empty", "", 0}, {"status", NULL, 200}};
    unsetenv("JOURNAL_STREAM");
    log_set_format(LOG_FORMAT_JSON);
    log_warn("said \"%s\"", "hi\n");
    log_event(LOG_LEVEL_INFO, "request", fields, 3);
    log_event(LOG_LEVEL_DEBUG, "not shown", fields, 3);
    log_set_format(LOG_FORMAT_PLAIN);
    log_event(LOG_LEVEL_INFO, "request", fields, 3);
    caught(fd, text, sizeof text);
    cr_assert_not_null(strstr(text, "Z\",\"level\":\"warn\",\"text\":\"said \\\"hi?\\\"\"}\n"));
    cr_assert_not_null(
        strstr(text, "\"text\":\"request\",\"path\":\"/v1/\\\"x\\\\\",\"status\":200}\n"));
    cr_assert_not_null(strstr(text, " info  request path=/v1/\"x\\ status=200\n"));
    cr_assert_null(strstr(text, "not shown"));
}

Test(log, a_field_that_does_not_fit_is_left_out) {
    char text[9000], huge[4000];
    int fd = capture();
    memset(huge, 'a', sizeof huge - 1);
    huge[sizeof huge - 1] = '\0';
    const struct log_field fields[] = {{"a", huge, 0}, {"b", NULL, 7}};
    log_set_format(LOG_FORMAT_JSON);
    log_event(LOG_LEVEL_INFO, "t", fields, 2);
    log_info("%s", huge);
    log_set_format(LOG_FORMAT_PLAIN);
    caught(fd, text, sizeof text);
    cr_assert_not_null(strstr(text, "\"text\":\"t\",\"b\":7}\n"));
    cr_assert_not_null(strstr(text, "aaa...\"}\n"));
}
