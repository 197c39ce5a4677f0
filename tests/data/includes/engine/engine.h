/* Closes the circle that paging/wrong.c opens. */
#include "paging/wrong.h"
