//! What only Rust has: threads, lifetimes, errors.
use std::path::PathBuf;
use std::time::Duration;

use thimble::{sys, Model, Options, Retention, Session};

fn in_root(path: &str) -> PathBuf {
    PathBuf::from(std::env::var("THIMBLE_ROOT").expect("THIMBLE_ROOT is set")).join(path)
}

fn open() -> Model {
    Model::open(in_root("models/thimble-demo-28m-q8_0.gguf")).expect("the model opens")
}

fn session(model: &Model) -> Session {
    let options = Options::new()
        .threads(2)
        .device("cpu")
        .budget_bytes(64 << 20)
        .retention(Retention::Window)
        .pool(256)
        .chunk(128);
    model.session(&options).expect("it fits")
}

#[test]
fn models_are_shared_and_sessions_sent() {
    fn shared<T: Send + Sync>() {}
    fn sent<T: Send>() {}
    shared::<Model>();
    shared::<thimble::Heads>();
    shared::<thimble::Interrupter>();
    shared::<Options>();
    sent::<Session>();
}

#[test]
fn another_thread_stops_a_reading_and_the_same_call_goes_on() {
    let model = open();
    let mut session = session(&model);
    let book = std::fs::read(in_root("models/demo-book.txt")).expect("the book can be read");
    let ids = &model.tokenize(book, 0).expect("it has a tokenizer")[..2000];
    let interrupter = session.interrupter();
    let stopper = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        interrupter.interrupt();
    });
    // A busy machine may wake the stopper after a reading has ended, so the session reads until it is stopped.
    let mut readings = 1;
    let stopped = loop {
        match session.feed(ids) {
            Ok(()) => readings += 1,
            Err(error) => break error,
        }
    };
    assert_eq!((stopped.code, stopped.name()), (sys::THIMBLE_INTERRUPTED, "INTERRUPTED"));
    stopper.join().expect("it ends");
    session.feed(ids).expect("it goes on");
    assert_eq!(session.stats().expect("it answers").position, 2000 * readings);
}

#[test]
fn a_session_holds_its_model_and_may_change_threads() {
    let mut session = session(&open());
    let pieces = std::thread::spawn(move || {
        let ids = session.model().tokenize("Once upon a time", thimble::ADD_BOS)?;
        session.feed(&ids)?;
        session.generate(4).collect::<thimble::Result<Vec<String>>>()
    });
    let pieces = pieces.join().expect("it ends").expect("it reads");
    assert!(!pieces.is_empty() && pieces.iter().all(|piece| !piece.is_empty()));
}

#[test]
fn errors_say_what_is_wrong() {
    let error = Model::open("no-such-file.gguf").err().expect("there is none");
    assert_eq!(error.code, sys::THIMBLE_IO);
    assert!(error.to_string().contains("no-such-file.gguf"), "{}", error);
    let (one, other) = (open(), open());
    let heads = other.heads(in_root("models/thimble-demo-28m.locret.gguf")).expect("they fit");
    let error = one.plan(&Options::new().heads(&heads)).err().expect("they are another model's");
    assert!(error.message.contains("another model"), "{}", error);
}

#[test]
fn the_processor_is_among_the_devices() {
    assert!(thimble::devices().expect("they are listed").iter().any(|device| device.name == "cpu"));
    assert_eq!(thimble::version().split('.').count(), 3);
}
