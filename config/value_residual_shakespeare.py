"""Value residual: in every later layer v = a v_l + b v_0, with v_0 from the first; a and b learned, initially ½."""

value_residual = True
