"""Generated from proto/kmesh/v1 by tools/gen_proto.py. Do not edit."""
