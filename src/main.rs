//! The command `towline`.

fn main() {}
