//! Programs under `farheap run`: what the command passes on and refuses, the calls that they make, their code.

mod code;
mod command;
#[path = "../common/mod.rs"]
mod common;
mod confined;
mod family;
