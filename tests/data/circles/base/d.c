/* tools/check_circles must refuse the circle of these five files. */
void d_call(void);
void e_call(void);

void d_call(void) {
    e_call();
}
