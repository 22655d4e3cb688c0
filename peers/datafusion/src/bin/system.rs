//! The engine on the system's allocator, which `farheap-peer-datafusion` starts as a child.

use std::process::ExitCode;

fn main() -> ExitCode {
    farheap_peer_datafusion::main()
}
