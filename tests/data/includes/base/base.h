/* tools/check_includes must refuse paging/wrong.c beside this file. */
