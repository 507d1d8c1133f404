// Counted up whenever a function's arguments change, so that a library built before is not used.

extern "C" int shardrec_solve_version() { return 4; }
