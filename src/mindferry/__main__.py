from mindferry.cli import main

main()
