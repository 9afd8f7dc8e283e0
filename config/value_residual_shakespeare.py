"""Value residual: in each layer v = a v_l + b v_0, v_0 those of the first layer, a and b learned, ½ at first."""

value_residual = True
