//! Why an example has nothing to report, and its exit status.

use farheap::Error;
use std::process::ExitCode;

/// Why there is no report.
pub(crate) struct Failure {
    pub(crate) status: u8,
    pub(crate) text: String,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        let status = match error {
            Error::UffdUnavailable { .. } => 3,
            Error::Config { .. }
            | Error::BadSize { .. }
            | Error::Device { .. }
            | Error::LimitTooSmall { .. } => 2,
            _ => 1,
        };
        Failure { status, text: error.to_string() }
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Failure {
        Failure { status: 1, text: error.to_string() }
    }
}

/// The end of the example `name`: whether what it reports `holds`, or why there is no report.
pub(crate) fn end(name: &str, holds: Result<bool, Failure>) -> ExitCode {
    match holds {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(failure) => {
            eprintln!("{name}: {}", failure.text);
            ExitCode::from(failure.status)
        }
    }
}
