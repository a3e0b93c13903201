//! Reads a text inside 64 MiB and streams what comes next: cargo run --example read MODEL.gguf TEXT.txt
use std::error::Error;
use std::io::Write;

use thimble::{Model, Options, Retention};

fn read(model: &str, text: &str) -> Result<(), Box<dyn Error>> {
    let model = Model::open(model)?;
    let options = Options::new().budget_bytes(64 << 20).retention(Retention::Window).pool(1024);
    let mut session = model.session(&options)?;
    session.feed(&model.tokenize(std::fs::read(text)?, thimble::ADD_BOS)?)?;
    for piece in session.generate(64) {
        print!("{}", piece?);
        std::io::stdout().flush()?;
    }
    println!();
    Ok(())
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if arguments.len() != 3 {
        eprintln!("usage: read MODEL.gguf TEXT.txt");
        std::process::exit(2);
    }
    if let Err(error) = read(&arguments[1], &arguments[2]) {
        eprintln!("read: {}", error);
        std::process::exit(1);
    }
}
