"""The layout of a plan's int32 and of a result's rows as plain numbers: kernels get those that they need as constexprs."""

HEADER = 16  # int32 of a plan's header
STEP = 2  # index in the header of the step's low word
COUNTS = 4  # index in the header of the number of rows of the first section; then come the others', and the bytes of admissions
SECTIONS = {"rows": 3, "chunks": 6, "appends": 4, "releases": 4, "zeros": 2, "spans": 2, "encodes": 4}  # in order: int32 of a row
RESULT_HEAD = 4  # int32 of a result's row in front of its tokens
