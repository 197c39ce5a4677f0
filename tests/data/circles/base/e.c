/* tools/check_circles must refuse the circle of these five files. */
void e_call(void);
void a_call(void);

void e_call(void) {
    a_call();
}
