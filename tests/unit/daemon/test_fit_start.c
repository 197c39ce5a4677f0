/* The folder of gates that were fitted. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/fit_start.h"

static void expect_folder(const char *given, const char *wanted) {
    char out[64];
    cr_assert(fit_cache_folder(given, out, sizeof out));
    cr_expect_str_eq(out, wanted);
}

Test(fit_start, the_folder_is_given_or_of_the_service_or_of_the_user) {
    char out[64];
    setenv("HOME", "/home/nora", 1);
    setenv("XDG_CACHE_HOME", "", 1);
    unsetenv("CACHE_DIRECTORY");
    expect_folder(NULL, "/home/nora/.cache/keepd/gates");
    setenv("XDG_CACHE_HOME", "/xdg", 1);
    expect_folder(NULL, "/xdg/keepd/gates");
    setenv("CACHE_DIRECTORY", "/var/cache/keepd:/var/cache/other", 1);
    expect_folder(NULL, "/var/cache/keepd/gates");
    expect_folder("here", "here");
    cr_expect_not(fit_cache_folder("", out, sizeof out));
    unsetenv("CACHE_DIRECTORY");
    unsetenv("XDG_CACHE_HOME");
    unsetenv("HOME");
    cr_expect_not(fit_cache_folder(NULL, out, sizeof out));
    setenv("HOME", "/a/name/that/is/too/long/for/the/sixty-four/bytes/that/there/are", 1);
    cr_expect_not(fit_cache_folder(NULL, out, sizeof out));
}

Test(fit_start, the_folder_is_made_with_those_above_it) {
    char dir[] = "/tmp/keepd-test-XXXXXX", file[64], path[64];
    struct stat info;
    cr_assert_not_null(mkdtemp(dir));
    snprintf(file, sizeof file, "%s/a/b/gates", dir);
    cr_expect(fit_make_folder(file) && fit_make_folder(file));
    snprintf(path, sizeof path, "%s/a/b", dir);
    cr_assert_eq(stat(path, &info), 0);
    cr_expect_eq(info.st_mode & 0777, 0700);
    cr_expect_not(fit_make_folder("/proc/self/fit/gates"));
    rmdir(path);
    *strrchr(path, '/') = '\0';
    rmdir(path);
    rmdir(dir);
}
