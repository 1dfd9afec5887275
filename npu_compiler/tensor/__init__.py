"""What one tensor is: strided views, layouts, scalar expressions and bounds, and what tracing leaves behind."""
