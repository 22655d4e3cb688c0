//! `farheap completions` and `farheap man`: what shells and `man(1)` know of the command, from its arguments.

use clap::ValueHint;
use clap_complete::Shell;
use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

/// Prints completions of this command for a shell.
#[derive(clap::Args)]
#[command(
    after_help = "bash reads ~/.local/share/bash-completion/completions/farheap, fish ~/.config/fish/completions/farheap.fish,
zsh the file _farheap in a directory of $fpath."
)]
pub(crate) struct Completions {
    /// Shell that is to complete
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

/// Writes the man pages of this command and its subcommands into a directory, such as ~/.local/share/man/man1.
#[derive(clap::Args)]
pub(crate) struct Man {
    /// Directory, made where it is missing
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    dir: PathBuf,
}

pub(crate) fn completions(options: &Completions, command: clap::Command) -> io::Result<ExitCode> {
    io::stdout().lock().write_all(&completions_for(options.shell, command))?;
    Ok(ExitCode::SUCCESS)
}

/// In memory first: the generator panics where it cannot write.
fn completions_for(shell: Shell, mut command: clap::Command) -> Vec<u8> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut command, "farheap", &mut text);
    text
}

pub(crate) fn man(options: &Man, command: clap::Command) -> io::Result<ExitCode> {
    let made = fs::create_dir_all(&options.dir);
    // A page's head names the version, which subcommands do not have.
    let command = command.mut_subcommands(|subcommand| {
        subcommand.version(env!("CARGO_PKG_VERSION")).disable_version_flag(true)
    });
    made.and_then(|()| clap_mangen::generate_to(command, &options.dir)).map_err(|error| {
        io::Error::new(error.kind(), format!("{}: {error}", options.dir.display()))
    })?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cli;
    use clap::CommandFactory;

    /// Long options of a text of `--help`.
    fn options(help: &str) -> Vec<String> {
        let lines = help.lines().filter(|line| line.trim_start().starts_with('-'));
        let words = lines.flat_map(|line| line.split([' ', ',']));
        words.filter(|word| word.starts_with("--")).map(str::to_owned).collect()
    }

    /// The part of a text between the first `begin` and the next `end`.
    fn part<'a>(text: &'a str, begin: &str, end: &str) -> &'a str {
        let (_, part) = text.split_once(begin).unwrap_or_else(|| panic!("no {begin} in {text}"));
        part.split(end).next().expect("there is a first one")
    }

    #[test]
    fn pages_and_completions_have_each_subcommand_and_option_of_the_help() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut command = Cli::command();
        let dir = dir.path().join("man/man1"); // It is missing.
        man(&Man { dir: dir.clone() }, command.clone()).expect("pages");
        let page = |name: &str| {
            let page = fs::read_to_string(dir.join(format!("{name}.1"))).expect(name);
            page.replace('\\', "")
        };
        let text = |shell| String::from_utf8(completions_for(shell, Cli::command())).expect("text");
        let [bash, zsh, fish] = [Shell::Bash, Shell::Zsh, Shell::Fish].map(text);
        let (whole, help) = (page("farheap"), command.render_long_help().to_string());
        let mut count = 0;
        for subcommand in command.get_subcommands_mut() {
            let name = subcommand.get_name().to_owned();
            if name == "help" {
                continue; // Of clap, and without options.
            }
            assert!(help.contains(&format!("  {name} ")), "{name}: {help}");
            assert!(whole.contains(&format!("farheap-{name}(1)")), "{name}: {whole}");
            let page = page(&format!("farheap-{name}"));
            let head = page.lines().find(|line| line.starts_with(".TH")).expect("a head");
            assert!(head.contains(env!("CARGO_PKG_VERSION")), "{head}");
            let bash = part(&bash, &format!("farheap__subcmd__{name})\n"), "return 0");
            let zsh = part(&zsh, &format!("({name})\n"), "&& ret=0");
            let fish = fish.lines().filter(|line| line.contains(&format!("subcommand {name}\"")));
            let fish = fish.collect::<Vec<_>>().join("\n");
            for option in options(&subcommand.render_long_help().to_string()) {
                count += 1;
                let of_fish = format!(" -l {} ", &option[2..]);
                for (text, option) in
                    [(&*page, &option), (bash, &option), (zsh, &option), (&*fish, &of_fish)]
                {
                    assert!(text.contains(option), "{name} has no {option} in {text}");
                }
            }
        }
        assert!(count >= 20, "{count} options were found in the help");
    }
}
