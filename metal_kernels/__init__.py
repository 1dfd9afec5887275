"""Metal kernel sources. Data, not code: the compiler reads them, the device compiles them."""
